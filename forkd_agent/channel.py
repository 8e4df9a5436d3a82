"""A stream of frames on non-blocking files: cut lines in, queue lines out, never wait.

Knows nothing of requests. Serves the host's port, a test's socket and the
interpreter's pipes alike.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable

from forkd_agent.loop import EDGE, HUP, IN, OUT, Loop, Timer
from forkd_agent.protocol import Frame, LineBuffer, ProtocolError, decode, encode

FULL_BYTES = 1024 * 1024  # producers that can wait do so above this
STALL_BYTES = 4 * FULL_BYTES  # above this no more requests are read either
DRAINED_BYTES = FULL_BYTES // 4
READ_BYTES = 64 * 1024
READS_PER_TURN = 4
WRITE_BYTES = 32 * 1024  # what the virtio port takes at once
HANGUP_GRACE_S = 1.0


class Channel:
    def __init__(
        self,
        loop: Loop,
        rfd: int,
        wfd: int,
        on_frame: Callable[[Frame], None],
        on_down: Callable[[], None],
        *,
        port: bool = False,
    ) -> None:
        self.dropped = 0  # lines that were not frames
        self._loop = loop
        self._rfd, self._wfd = rfd, wfd
        self._on_frame, self._on_down = on_frame, on_down
        self._port = port
        self._lines = LineBuffer()
        self._queue: deque[bytes] = deque()
        self._block = b""  # what is being written, up to `_sent`
        self._sent = 0
        self._size = 0
        self._flush_due = False
        self._stalled = False
        self._closed = False
        self._hangup: Timer | None = None
        self._waiting: list[Callable[[], None]] = []
        for fd in {rfd, wfd}:
            os.set_blocking(fd, False)
        # Edge-triggered: each handler below goes on until the file has nothing more, or comes back by itself.
        loop.watch(rfd, IN | OUT | EDGE if rfd == wfd else IN | EDGE, self._event)
        if wfd != rfd:
            loop.watch(wfd, OUT | EDGE, self._event)

    @property
    def full(self) -> bool:
        return self._size > FULL_BYTES

    def when_drained(self, fn: Callable[[], None]) -> None:
        self._waiting.append(fn)

    def send(self, frame: Frame) -> None:
        self._push(encode(frame))

    def reset(self) -> None:
        """Forget what the peer has not yet read; a line it has half of is ended, to be dropped there."""
        torn = 0 < self._sent < len(self._block) and self._block[self._sent - 1] != 0x0A
        self._clear()
        if torn:
            self._push(b"\n")

    def close(self) -> None:
        self._closed = True
        self._loop.cancel(self._hangup)
        for fd in {self._rfd, self._wfd}:
            self._loop.unwatch(fd)
            os.close(fd)
        self._clear()

    def pump(self, reads: int = READS_PER_TURN) -> None:
        """Read and hand on what is there."""
        for _ in range(reads):
            if self._closed:
                return
            self._stalled = self._size > STALL_BYTES and self._hangup is None
            if self._stalled:
                return  # _release() comes back here
            data = self._read()
            if data is None:
                return
            self._take(data)
        self._loop.soon(self.pump)

    def _event(self, events: int) -> None:
        if self._port:
            self._note_hangup(bool(events & HUP))
        if events & OUT:
            self._flush()
        if events & ~OUT:
            self.pump()

    def _note_hangup(self, hung_up: bool) -> None:
        # The port's state and its data travel on separate queues: a hang-up can be reported after the first
        # bytes of the next host. Only one that lasts counts; a new host's `hello` does the same job sooner.
        if not hung_up:
            self._loop.cancel(self._hangup)
            self._hangup = None
        elif self._hangup is None:
            self._hangup = self._loop.later(HANGUP_GRACE_S, self._on_down)

    def _read(self) -> bytes | None:
        try:
            data = os.read(self._rfd, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if data:
            return data
        if not self._port:  # a port reads empty while no host is there, and lives on
            self._on_down()
        return None

    def _take(self, data: bytes) -> None:
        try:
            for line in self._lines.feed(data):
                if line:
                    self._take_line(line)
        except ProtocolError:
            self.dropped += 1

    def _take_line(self, line: bytes) -> None:
        try:
            frame = decode(line)
        except ProtocolError:
            self.dropped += 1
            return
        if not self._closed:
            self._on_frame(frame)

    def _push(self, line: bytes) -> None:
        if self._closed:
            return
        self._queue.append(line)
        self._size += len(line)
        if not self._flush_due:
            # At the end of the turn, so that what one turn says leaves in one write: each wakes the host.
            self._flush_due = True
            self._loop.soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        while not self._closed and self._load():
            try:
                sent = os.write(self._wfd, memoryview(self._block)[self._sent : self._sent + WRITE_BYTES])
            except OSError as e:
                if e.errno != errno.EAGAIN:
                    self._clear()  # the reader is gone; reading will say so
                break
            if sent == 0:
                break
            self._sent += sent
            self._size -= sent
        self._release()

    def _load(self) -> bool:
        """Have something to write in `_block`; several short lines go as one."""
        if self._sent < len(self._block):
            return True
        taken: list[bytes] = []
        size = 0
        while self._queue and size < WRITE_BYTES:
            taken.append(self._queue.popleft())
            size += len(taken[-1])
        self._block, self._sent = b"".join(taken), 0
        return bool(taken)

    def _clear(self) -> None:
        self._queue.clear()
        self._block, self._sent, self._size = b"", 0, 0
        self._release()

    def _release(self) -> None:
        if self._size > DRAINED_BYTES:
            return
        waiting, self._waiting = self._waiting, []
        for fn in waiting:
            self._loop.soon(fn)
        if self._stalled:
            self._stalled = False
            self._loop.soon(self.pump)
