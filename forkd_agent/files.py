"""Reading and writing files for the host, in chunks, never waiting on anything but a disk.

Only regular files: a FIFO would hang the agent, and opening a device can have effects of its own.
"""

from __future__ import annotations

import os
import stat

from forkd_agent.loop import Loop
from forkd_agent.protocol import CHUNK_BYTES, Frame, pack_bytes
from forkd_agent.requests import BadRequest, Desk, Request, get, get_count

_CHUNKS_PER_TURN = 4


class NotRegular(OSError):
    """The path names something that is not a regular file."""


class Read(Request):
    def __init__(self, desk: Desk, loop: Loop, frame: Frame) -> None:
        super().__init__(desk, frame["id"])
        path = _path(frame)
        offset = get_count(frame, "offset", 0) or 0
        self._left = get_count(frame, "limit", None)
        self._loop = loop
        self._sent = 0
        self._fd = -1
        desk.add(self)
        try:
            self._fd = _open_regular(path)
            self._stat = os.fstat(self._fd)
            if offset:
                os.lseek(self._fd, offset, os.SEEK_SET)
        except (OSError, ValueError) as e:
            self._close()
            self.fail_with(e, f"cannot read {path!r}")
        else:
            self._pump()

    def _pump(self) -> None:
        if self._fd < 0:
            return
        for _ in range(_CHUNKS_PER_TURN):
            if self.desk.full:
                self.desk.when_drained(self._pump)
                return
            if not self._chunk():
                return
        self._loop.soon(self._pump)

    def _chunk(self) -> bool:
        wanted = CHUNK_BYTES if self._left is None else min(CHUNK_BYTES, self._left)
        try:
            data = os.read(self._fd, wanted)
        except OSError as e:
            self._close()
            self.fail_with(e, "reading failed")
            return False
        if not data:
            self._close()
            # The size is counted, not taken from the inode: files under /proc have none there.
            self.end(size=self._sent, mode=stat.S_IMODE(self._stat.st_mode), file_size=self._stat.st_size)
            return False
        self._sent += len(data)
        if self._left is not None:
            self._left -= len(data)
        self.event("chunk", b=pack_bytes(data))
        return True

    def cancel(self) -> None:
        self._close()
        super().cancel()

    def detach(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Write(Request):
    """Collects into a hidden file beside the target and renames it at the end: whole or not at all."""

    def __init__(self, desk: Desk, frame: Frame) -> None:
        super().__init__(desk, frame["id"])
        path = _path(frame)
        mode = get_count(frame, "mode", None)
        if mode is not None and mode > 0o7777:
            raise BadRequest("field 'mode' must be permission bits, at most 0o7777")
        mkdirs = get(frame, "mkdirs", bool, False)
        self._size = 0
        self._fd = -1
        self._temp = ""
        self._path = path
        desk.add(self)
        try:
            self._open(mode, mkdirs=mkdirs)
        except (OSError, ValueError) as e:
            self._give_up(e)

    def _open(self, mode: int | None, *, mkdirs: bool) -> None:
        # Through a link the file it points to is written, as any other program would.
        self._target = os.path.realpath(self._path)
        folder = os.path.dirname(self._target)
        old = _stat_or_none(self._target)
        if old is not None:
            _check_regular(old.st_mode)
        if mkdirs:
            os.makedirs(folder, exist_ok=True)
        temp = f"{folder}/.forkd-{os.urandom(8).hex()}"
        self._fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._temp = temp
        if old is not None:
            os.fchown(self._fd, old.st_uid, old.st_gid)
            os.fchmod(self._fd, stat.S_IMODE(old.st_mode))
        if mode is not None:
            os.fchmod(self._fd, mode)

    def data(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        try:
            while rest:
                written = os.write(self._fd, rest)
                self._size += written
                rest = rest[written:]
        except OSError as e:
            self._give_up(e)

    def eof(self) -> None:
        try:
            os.rename(self._temp, self._target)
        except OSError as e:
            self._give_up(e)
            return
        self._temp = ""
        self._clean()
        self.end(size=self._size)

    def cancel(self) -> None:
        self._clean()
        super().cancel()

    def detach(self) -> None:
        self._clean()

    def _give_up(self, error: Exception) -> None:
        self._clean()
        self.fail_with(error, f"cannot write {self._path!r}")

    def _clean(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temp:
            try:
                os.unlink(self._temp)
            except OSError:
                pass  # removed, or its disk gone read-only: nothing more can be done about it
            self._temp = ""


def _path(frame: Frame) -> str:
    path: str = get(frame, "path", str)
    if not path.startswith("/") or "\0" in path:
        raise BadRequest("field 'path' must be absolute")
    return path


def _open_regular(path: str) -> int:
    # Looked at before it is opened, since opening a device can act; and after, since it may have changed.
    _check_regular(os.stat(path).st_mode)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError("it is a directory")
    if not stat.S_ISREG(mode):
        kinds = {
            stat.S_IFIFO: "a FIFO",
            stat.S_IFSOCK: "a socket",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
        }
        raise NotRegular(f"it is {kinds.get(stat.S_IFMT(mode), 'special')}, not a regular file")


def _stat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
