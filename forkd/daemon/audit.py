"""The audit log: one JSON line per request, in one append.

An append goes to the page cache and is done on the event loop; waiting for the
disk is not. A call that changes what exists on the host is answered after its
line is on the disk; a call that acts inside a sandbox after its line is written
(which a killed daemon cannot undo); a call that only looks, before. When lines
cannot be written, calls that change or run something are refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkd.daemon.metrics import Metrics
from forkd.daemon.replies import error_reply
from forkd.errors import AuditFailed, BadField

_TEXT_CHARS = 512
_LEAST_FREE_BYTES = 64 * 1024
_NOT_DONE_HINT = "free space on the audit log's disk, or mend its path; reading calls still work"
_DONE_HINT = "the call was carried out: look before you repeat it"


class AuditLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._identity = (0, 0)
        self._torn = False
        self._failure: str | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._next_sync: asyncio.Task[None] | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as e:
            raise BadField("audit_log", f"cannot open {path}: {e.strerror}") from e

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def refuse_if_failing(self) -> None:
        """AuditFailed if the next line is known to have no place."""
        failure = self._failure
        if failure is None:
            disk = os.fstatvfs(self._fd)
            if disk.f_blocks and disk.f_bavail * disk.f_frsize < _LEAST_FREE_BYTES:
                failure = "its disk is full"
        if failure is not None:
            raise AuditFailed(f"refused: the audit log cannot be written: {failure}", hint=_NOT_DONE_HINT)

    def append(self, line: bytes) -> None:
        """Write one line. On failure: AuditFailed, and calls that change things are refused from now on."""
        try:
            self._follow_rotation()
            data = b"\n" + line if self._torn else line
            if os.write(self._fd, data) != len(data):
                self._torn = True
                raise OSError("only a part of the line could be written")
        except OSError as e:
            raise self._failed(e) from e
        self._torn = False
        self._failure = None

    async def sync(self) -> None:
        """Return once everything appended so far is on the disk. Concurrent callers share one fdatasync."""
        if self._next_sync is None:
            self._next_sync = asyncio.get_running_loop().create_task(self._sync_after(self._syncing))
        try:
            await asyncio.shield(self._next_sync)
        except OSError as e:
            raise self._failed(e) from e

    async def _sync_after(self, running: asyncio.Task[None] | None) -> None:
        # The one that runs may have begun before our line was written.
        if running is not None:
            await asyncio.wait([running])
        self._syncing, self._next_sync = self._next_sync, None
        fd = os.dup(self._fd)  # a rotation may close ours meanwhile
        try:
            await asyncio.to_thread(os.fdatasync, fd)
        finally:
            os.close(fd)

    def _failed(self, error: OSError) -> AuditFailed:
        self._failure = error.strerror or str(error)
        return AuditFailed(f"the audit log could not be written: {self._failure}", hint=_DONE_HINT)

    def _follow_rotation(self) -> None:
        try:
            found = self._path.stat()
            if (found.st_dev, found.st_ino) == self._identity:
                return
        except FileNotFoundError:
            pass
        old = self._fd
        self._open()
        # Replies under way wait for lines that are in the old file.
        os.fdatasync(old)
        os.close(old)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        found = os.fstat(fd)
        self._fd, self._identity = fd, (found.st_dev, found.st_ino)
        # A crash in the middle of an append leaves half a line; ours starts on a fresh one.
        whole = not stat.S_ISREG(found.st_mode) or found.st_size == 0
        self._torn = not whole and os.pread(fd, 1, found.st_size - 1) != b"\n"


class _Kind(Enum):
    LOOKS = 1
    ACTS_INSIDE = 2
    CHANGES = 3


def _kind(scope: Scope) -> _Kind:
    last = scope["path"].rpartition("/")[2]
    if scope["method"] in ("GET", "HEAD", "OPTIONS") or last in ("ping", "touch"):
        return _Kind.LOOKS
    return _Kind.ACTS_INSIDE if last in ("exec", "eval", "files") else _Kind.CHANGES


class _Flood:
    """Admits bursts of refused tokens into the log, not floods: a bucket of `size`, refilled by time."""

    def __init__(self, size: int, per_sec: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._per_sec, self._clock = size, per_sec, clock
        self._level, self._seen = float(size), clock()

    def admit(self) -> bool:
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._seen) * self._per_sec)
        self._seen = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class AuditLayer:
    """Outermost: everything that is answered passes here, also what the layers inside refuse."""

    def __init__(self, app: ASGIApp, log: AuditLog, metrics: Metrics) -> None:
        self._app = app
        self._log = log
        self._metrics = metrics
        self._flood = _Flood(size=100, per_sec=10)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = _Record(self, scope, receive, send)
        with self._metrics.request():
            try:
                await self._app(scope, receive, record.send)
            finally:
                record.finish()

    def write(self, scope: Scope, status: int, began: float) -> None:
        if status == 401 and not self._flood.admit():
            self._metrics.suppressed_audit_lines.inc()
            return
        try:
            self._log.append(_line(scope, status, began))
        except AuditFailed:
            self._metrics.lost_audit_lines.inc()
            raise

    async def settle(self) -> None:
        try:
            await self._log.sync()
        except AuditFailed:
            self._metrics.lost_audit_lines.inc()
            raise

    def answered(self, scope: Scope, status: int) -> None:
        self._metrics.answered(scope, status)


class _Record:
    """One request on its way through the layer."""

    def __init__(self, layer: AuditLayer, scope: Scope, receive: Receive, send: Send) -> None:
        self._layer, self._scope, self._receive, self._send = layer, scope, receive, send
        self._began = time.monotonic()
        self._status = 0  # none yet: the client left, or we failed, before an answer
        self._written = False
        self._replaced = False

    async def send(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            try:
                await self._before_reply()
            except AuditFailed as e:
                self._replaced, self._status = True, e.status
                await error_reply(e)(self._scope, self._receive, self._send)
                return
        await self._send(message)

    async def _before_reply(self) -> None:
        kind = _kind(self._scope)
        # What was refused has changed nothing: its line can be lost without refusing it twice.
        if kind is _Kind.LOOKS or not 200 <= self._status < 300:
            return
        self._written = True
        self._layer.write(self._scope, self._status, self._began)
        if kind is _Kind.CHANGES:
            await self._layer.settle()

    def finish(self) -> None:
        status = self._status or 500
        self._layer.answered(self._scope, status)
        if not self._written:
            try:
                self._layer.write(self._scope, status, self._began)
            except AuditFailed:
                pass  # counted


class AuditGate:
    """Inside the token check: refuses what could not be recorded, before it is done."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _kind(scope) is not _Kind.LOOKS:
            try:
                self._log.refuse_if_failing()
            except AuditFailed as e:
                await error_reply(e)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _line(scope: Scope, status: int, began: float) -> bytes:
    agent = next((value for name, value in scope["headers"] if name == b"user-agent"), b"")
    fields = {
        "ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "method": scope["method"][:_TEXT_CHARS],
        # As it was sent, without the query: a decoded path could be two different ones.
        "path": scope["raw_path"].decode("latin-1")[:_TEXT_CHARS],
        "status": status,
        "latency_us": int((time.monotonic() - began) * 1e6),
        "ua": agent.decode("latin-1")[:_TEXT_CHARS],
    }
    return json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"
