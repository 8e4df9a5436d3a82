"""Running commands: start, stream, feed, signal, time out, end.

One `Exec` per command. What "the whole tree" means is in trees.py.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque

from forkd_agent import kernel
from forkd_agent.loop import IN, OUT, Loop, Timer
from forkd_agent.protocol import CHUNK_BYTES, Frame, pack_bytes
from forkd_agent.requests import BadRequest, Desk, Request, get, get_count, get_env, get_seconds
from forkd_agent.trees import Tree, Trees

DEFAULT_CAP_BYTES = 1024 * 1024
MAX_WATCHED = 700  # open pipes; a process may have 1024 files by default
STDIN_BYTES = 8 * 1024 * 1024  # input a command may leave unread before it is given up
_LAST_WORDS_BYTES = (
    128 * 1024
)  # more than a pipe holds: what was written before the exit is read, and no more


class Runner:
    """What every command shares."""

    def __init__(self, loop: Loop, desk: Desk, trees: Trees, env: dict[str, str], *, shielded: bool) -> None:
        self.loop = loop
        self.desk = desk
        self.trees = trees
        self.env = env
        self.shielded = shielded  # the agent is, so commands have to be exposed

    def start(self, frame: Frame) -> None:
        if self.loop.load > MAX_WATCHED:
            raise OSError("too many commands are running at once; wait for some to end")
        args = _args(frame)
        env = {**self.env, **get_env(frame)}
        cwd = get(frame, "cwd", str, None)
        timeout = get_seconds(frame, "timeout")
        cap = get_count(frame, "cap", DEFAULT_CAP_BYTES)
        wants_stdin = get(frame, "stdin", bool, False)
        if frame.get("pty") is not None:
            raise BadRequest("field 'pty' is reserved; this agent has no terminals")
        request = Exec(self, frame["id"], DEFAULT_CAP_BYTES if cap is None else cap)
        self.desk.add(request)
        try:
            request.launch(args, env, cwd, wants_stdin=wants_stdin)
        except OSError as e:
            # Popen names the folder, not the program, when it is the folder that is wrong.
            what = (
                f"cannot use {cwd!r} as the working folder"
                if cwd and e.filename == cwd
                else f"cannot run {args[0]!r}"
            )
            request.fail_with(e, what)
        except ValueError as e:  # a NUL in an argument, or text that no encoding can carry
            request.fail("BadRequest", str(e))
        else:
            request.limit(timeout)


def _args(frame: Frame) -> list[str]:
    args: list[str] = get(frame, "args", list)
    if not args or not all(isinstance(a, str) for a in args):
        raise BadRequest("field 'args' must be a list of text with the program first")
    return args


class Stream:
    """The reading end of a command's stdout or stderr."""

    def __init__(self, owner: Exec, fd: int, number: int, cap: int) -> None:
        self.number = number
        self.truncated = False
        self._owner = owner
        self._loop = owner.runner.loop
        self._fd = fd
        self._left = cap
        self._open = True
        os.set_blocking(fd, False)
        self._loop.watch(fd, IN, self._ready)

    def _ready(self, _events: int) -> None:
        owner = self._owner
        if owner.attached and owner.desk.full:
            self._loop.unwatch(self._fd)
            owner.desk.when_drained(self.resume)
        else:
            self._read()

    def resume(self) -> None:
        if self._open:
            self._loop.unwatch(self._fd)
            self._loop.watch(self._fd, IN, self._ready)

    def drain(self) -> None:
        """Read what was written so far. Others may hold the pipe and write on: that is not waited for."""
        for _ in range(0, _LAST_WORDS_BYTES, CHUNK_BYTES):
            if not self._open or not self._read():
                return

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        kept = data[: self._left]
        self._left -= len(kept)
        self.truncated = self.truncated or len(kept) < len(data)
        if kept and self._owner.attached:
            self._owner.event("out", fd=self.number, b=pack_bytes(kept))
        return True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.unwatch(self._fd)
            os.close(self._fd)


class Stdin:
    """The writing end of a command's stdin."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._open = True
        self._complete = False
        self._queue: deque[bytes] = deque()
        self.size = 0
        os.set_blocking(fd, False)

    def feed(self, chunk: bytes) -> None:
        if self._open and not self._complete and chunk:
            self._queue.append(chunk)
            self.size += len(chunk)
            self._write()

    def finish(self) -> None:
        self._complete = True
        if self._open and not self._queue:
            self.close()

    def _write(self, _events: int = 0) -> None:
        self._loop.unwatch(self._fd)
        while self._queue:
            try:
                sent = os.write(self._fd, self._queue[0])
            except BlockingIOError:
                self._loop.watch(self._fd, OUT, self._write)
                return
            except OSError:  # the command closed its input; what else is sent for it is of no use
                self.close()
                return
            self.size -= sent
            rest = self._queue.popleft()[sent:]
            if rest:
                self._queue.appendleft(rest)
        if self._complete:
            self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._queue.clear()
            self.size = 0
            self._loop.unwatch(self._fd)
            os.close(self._fd)


class Exec(Request):
    def __init__(self, runner: Runner, number: int, cap: int) -> None:
        super().__init__(runner.desk, number)
        self.runner = runner
        self._cap = cap
        self._tree: Tree = runner.trees.make()
        self._streams: list[Stream] = []
        self._stdin: Stdin | None = None
        self._timer: Timer | None = None
        self._timed_out = False
        self._proc: subprocess.Popen[bytes] | None = None
        self._pidfd = -1

    def launch(self, args: list[str], env: dict[str, str], cwd: str | None, *, wants_stdin: bool) -> None:
        pipes = [os.pipe(), os.pipe()]
        stdin = os.pipe() if wants_stdin else (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1)
        theirs = [stdin[0], pipes[0][1], pipes[1][1]]
        ours = [pipes[0][0], pipes[1][0], *([stdin[1]] if wants_stdin else [])]
        try:
            with self._tree:
                proc = subprocess.Popen(
                    args,
                    stdin=theirs[0],
                    stdout=theirs[1],
                    stderr=theirs[2],
                    env={**env, **self._tree.environ()},
                    cwd=cwd,
                    start_new_session=True,
                )
        except BaseException:
            for fd in ours:
                os.close(fd)
            self._tree.release()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._adopt(proc, ours)

    def _adopt(self, proc: subprocess.Popen[bytes], ours: list[int]) -> None:
        self._proc = proc
        self._tree.pid = proc.pid
        if self.runner.shielded:
            kernel.shield_from_oom(proc.pid, shielded=False)
        self._pidfd = os.pidfd_open(proc.pid)
        self.runner.loop.watch(self._pidfd, IN, self._exited)
        self._streams = [Stream(self, fd, n, self._cap) for n, fd in enumerate(ours[:2], 1)]
        if len(ours) > 2:
            self._stdin = Stdin(self.runner.loop, ours[2])
        self.event("start", pid=proc.pid)

    def limit(self, timeout: float | None) -> None:
        if timeout is not None:
            self._timer = self.runner.loop.later(timeout, self._expire)

    def _expire(self) -> None:
        self._timed_out = True
        self._tree.kill()

    def data(self, chunk: bytes) -> None:
        if self._stdin is None:
            return
        self._stdin.feed(chunk)
        if self._stdin.size > STDIN_BYTES:
            self._tree.kill()
            self.fail(
                "BufferError",
                f"the command left more than {STDIN_BYTES} bytes of its input unread and was killed",
            )
            self.detach()

    def eof(self) -> None:
        if self._stdin is not None:
            self._stdin.finish()

    def signal(self, number: int) -> None:
        if self._proc is None or self._proc.returncode is not None:
            return
        try:
            os.killpg(self._proc.pid, number)
        except ProcessLookupError:
            pass  # it just ended; `end` follows

    def cancel(self) -> None:
        self._tree.kill()  # `end` follows when it is dead, with its last words

    def detach(self) -> None:
        self.runner.loop.cancel(self._timer)
        for stream in self._streams:
            stream.resume()

    def _exited(self, _events: int) -> None:
        assert self._proc is not None
        loop = self.runner.loop
        code = self._proc.wait()
        loop.cancel(self._timer)
        loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        if self._stdin is not None:
            self._stdin.close()
        self._tree.release()
        for stream in self._streams:
            stream.drain()
        truncated = {str(s.number): s.truncated for s in self._streams}
        self.end(exit_code=code, timed_out=self._timed_out, truncated=truncated)
        # A stream that is still open belongs to processes the command left behind. It is read on, unheard,
        # until they close it: closing it here would kill them at their next line of output.
        for stream in self._streams:
            stream.resume()
