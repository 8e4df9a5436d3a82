"""HTTP/1.1 to the daemon over kept-alive connections: TCP, TLS or a Unix socket.

Owns sockets and bytes, and turns every way they fail into one exception. Knows no route and no JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from forkd.client.failures import ConnectionFailed, TimedOut

_SUN_PATH_BYTES = 107  # of sockaddr_un, without the closing zero
_IDLE_KEPT = 16
# Servers close idle connections after some seconds. A request that must not be sent twice only goes out on a
# connection too young for that.
_SURE_SECS = 2.0
_GONE = (ConnectionResetError, BrokenPipeError)  # http.client.RemoteDisconnected is one of the first


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a base URL points."""

    scheme: str
    host: str = "localhost"
    port: int | None = None
    prefix: str = ""
    socket_path: str | None = None

    @classmethod
    def parse(cls, base_url: str) -> Endpoint:
        parts = urlsplit(base_url)
        if parts.scheme == "unix" and not parts.netloc and len(parts.path) > 1:
            return cls("unix", socket_path=unquote(parts.path))
        if parts.scheme in ("http", "https") and parts.hostname:
            return cls(parts.scheme, parts.hostname, parts.port, parts.path.rstrip("/"))
        raise ValueError(
            f"{base_url!r} is not an address of a daemon; write http://host:port, https://host:port"
            " or unix:///path/to/forkd.sock"
        )


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """A name for this socket that fits sockaddr_un, valid while the block runs."""
    if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            with short_path(self._path) as address:
                sock.connect(address)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


class Transport:
    """A pool of connections to one daemon, for any number of threads."""

    def __init__(self, base_url: str) -> None:
        self.endpoint = Endpoint.parse(base_url)
        self._base_url = base_url
        self._lock = threading.Lock()  # guards _idle and _pid; nothing blocks under it
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
        retry: bool,
    ) -> Reply:
        """Send one request and read its whole reply. `retry`: it may safely reach the daemon twice."""
        target, url = self.endpoint.prefix + path, self._base_url + path
        conn = self._reuse(sure=not retry)
        if conn is not None:
            try:
                return self._exchange(conn, method, target, headers, body, timeout)
            except _GONE as e:
                if not retry:
                    raise _failure(e, url) from e
            except (OSError, http.client.HTTPException) as e:
                raise _failure(e, url) from e
        try:
            return self._exchange(self._open(timeout), method, target, headers, body, timeout)
        except (OSError, http.client.HTTPException) as e:
            raise _failure(e, url) from e

    def close(self) -> None:
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
        _close_all(idle)

    def _exchange(
        self,
        conn: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
    ) -> Reply:
        keep = False
        try:
            conn.timeout = timeout
            if conn.sock is not None:
                conn.sock.settimeout(timeout)
            whole = True
            try:
                conn.request(method, target, body=body, headers=dict(headers))
            except _GONE:
                # A daemon that refuses a large upload answers and closes before it has read all of it.
                if not body or conn.sock is None:
                    raise
                whole = False
            response = conn.getresponse()
            try:
                reply = Reply(response.status, dict(response.headers.items()), response.read())
            except http.client.HTTPException as e:
                raise _CutShort(response.status) from e
            keep = whole and not response.will_close
            return reply
        finally:
            self._give_back(conn) if keep else conn.close()

    def _open(self, timeout: float) -> http.client.HTTPConnection:
        at = self.endpoint
        if at.socket_path is not None:
            return _UnixConnection(at.socket_path, timeout)
        kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
        return kind(at.host, at.port, timeout=timeout)  # it sets TCP_NODELAY itself

    def _reuse(self, *, sure: bool) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                if self._pid != os.getpid():  # after a fork these are the parent's conversations
                    self._pid = os.getpid()
                    stale, self._idle[:] = list(self._idle), []
                    _close_all(stale)
                if not self._idle:
                    return None
                conn, since = self._idle.pop()
            if not _readable(conn) and not (sure and time.monotonic() - since > _SURE_SECS):
                return conn
            conn.close()

    def _give_back(self, conn: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_KEPT:
                self._idle.append((conn, time.monotonic()))
                return
        conn.close()


class _CutShort(http.client.HTTPException):
    def __init__(self, status: int) -> None:
        super().__init__("the connection closed in the middle of the reply")
        self.status = status


def _readable(conn: http.client.HTTPConnection) -> bool:
    """Nothing is due on an idle connection: if there is something to read, it is the end."""
    if conn.sock is None:
        return True
    poll = select.poll()
    poll.register(conn.sock, select.POLLIN)
    return bool(poll.poll(0))


def _close_all(idle: list[tuple[http.client.HTTPConnection, float]]) -> None:
    for conn, _ in idle:
        conn.close()


def _failure(e: Exception, url: str) -> ConnectionFailed:
    if isinstance(e, TimeoutError):
        return TimedOut(url, "the daemon did not answer in time")
    if isinstance(e, _CutShort):
        return ConnectionFailed(url, str(e), status=e.status)
    if isinstance(e, http.client.RemoteDisconnected):
        return ConnectionFailed(url, "the daemon closed the connection without an answer")
    if isinstance(e, http.client.HTTPException):
        return ConnectionFailed(url, "what answers there does not speak HTTP")
    if isinstance(e, ConnectionRefusedError | FileNotFoundError):
        return ConnectionFailed(
            url, "no daemon is listening", hint="start one with `forkd-controller serve`, or check FORKD_URL"
        )
    problem = e.strerror if isinstance(e, OSError) and e.strerror else str(e) or type(e).__name__
    return ConnectionFailed(url, f"cannot talk to the daemon: {problem}")
