"""The agent's side of the warmed interpreter: start it, talk to it, start it again when it dies.

Also the three requests that end there: eval, warm and wake.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from forkd_agent import kernel
from forkd_agent.channel import Channel
from forkd_agent.loop import IN, Loop, Timer
from forkd_agent.protocol import Frame, ProtocolError, unpack_bytes
from forkd_agent.requests import BadRequest, Desk, Request, get, get_env, get_seconds

MAX_CALLS = 128  # waiting in the interpreter at once
MAX_CRASHES = 3  # warm-ups in a row that may kill the interpreter before it is started without

Reply = Callable[[Frame], None]


class Warmed:
    def __init__(self, loop: Loop, *, shielded: bool) -> None:
        self.ready = False  # the warm-up has run in the interpreter that is there now
        self.numpy_version: str | None = None
        self.env: dict[str, str] = {}
        self.script: str | None = None
        self._shielded = shielded
        self._loop = loop
        self._calls: dict[int, Reply] = {}
        self._last = 0
        self._crashes = 0

    def start(self) -> None:
        down, up = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_interpreter(down[0], up[1], shielded=self._shielded)
        os.close(down[0])
        os.close(up[1])
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._channel = Channel(self._loop, up[0], down[1], self._answered, _nothing)
        self._loop.watch(self._pidfd, IN, self._died)

    def call(self, op: str, frame: Frame, reply: Reply) -> int:
        """Ask the interpreter; `reply` gets its one answer, or the news of its death."""
        if len(self._calls) >= MAX_CALLS:
            raise OSError(f"{MAX_CALLS} requests are waiting in the interpreter already; try again later")
        self._last += 1
        try:
            self._channel.send({**frame, "id": self._last, "op": op})
        except ProtocolError as e:
            raise BadRequest(str(e)) from None
        self._calls[self._last] = reply
        return self._last

    def forget(self, call: int) -> None:
        self._calls.pop(call, None)

    def warm(self, reply: Reply) -> None:
        def done(answer: Frame) -> None:
            if answer["ev"] == "end":
                self.ready = True
                self._crashes = 0
                self.numpy_version = answer.pop("numpy_version", None) or self.numpy_version
            reply(answer)

        self.ready = False
        self.call("warm", {"script": self.script, "env": self.env}, done)

    def _answered(self, frame: Frame) -> None:
        reply = self._calls.pop(frame["id"], None)
        if reply is not None and frame.get("ev") in ("end", "error"):
            frame.pop("id")
            reply(frame)

    def _died(self, _events: int) -> None:
        self._channel.pump(1024)  # answers given before the end still count
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._channel.close()
        calls, self._calls = self._calls, {}
        self._crashes = 0 if self.ready else self._crashes + 1
        self.ready = False
        self.start()
        if self.script is not None and self._crashes < MAX_CRASHES:
            self.warm(_log_failed_warmup)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        text = f"the interpreter {how} before it answered; a new one was started"
        for reply in calls.values():
            reply({"ev": "error", "type": "InterpreterDied", "error": text})


def _become_interpreter(rfd: int, wfd: int, *, shielded: bool) -> None:
    try:
        # A bare fork passes on every file: the host's port, the pipes of commands.
        low, high = sorted((rfd, wfd))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
        kernel.name_process("forkd-python")
        if shielded:
            kernel.shield_from_oom(os.getpid(), shielded=False)
        from forkd_agent import interpreter

        interpreter.run(rfd, wfd)
    finally:
        os._exit(1)


def _nothing() -> None:
    """The pipe's end says less than the process's: a fork of the interpreter may still hold it."""


def _log_failed_warmup(answer: Frame) -> None:
    if answer["ev"] == "error":
        print(f"forkd-agent: the warm-up failed in a new interpreter: {answer.get('error')}", flush=True)


class Eval(Request):
    def __init__(self, desk: Desk, loop: Loop, warmed: Warmed, frame: Frame) -> None:
        super().__init__(desk, frame["id"])
        code = get(frame, "code", str)
        timeout = get_seconds(frame, "timeout")
        self._loop = loop
        self._warmed = warmed
        self._timer: Timer | None = None
        self._call = 0
        desk.add(self)
        self._call = warmed.call("eval", {"code": code}, self._answered)
        if timeout is not None:
            self._timer = loop.later(timeout, lambda: self._expire(timeout))

    def _answered(self, answer: Frame) -> None:
        self._loop.cancel(self._timer)
        if answer.pop("ev") == "error":
            # The code is what did it, so it is the code's result and not a failure of the request.
            self._fail_as_result(f"{answer['type']}: {answer['error']}")
        else:
            self.end(**answer)

    def _expire(self, timeout: float) -> None:
        self._warmed.forget(self._call)
        self._fail_as_result(
            f"TimeoutError: not finished after {timeout:g} seconds; its thread may still be running"
        )

    def _fail_as_result(self, error: str) -> None:
        self.end(error=error, traceback="", exit_code=1)

    def cancel(self) -> None:
        self.detach()
        super().cancel()

    def detach(self) -> None:
        self._loop.cancel(self._timer)
        self._warmed.forget(self._call)


class Warm(Request):
    def __init__(self, desk: Desk, warmed: Warmed, frame: Frame) -> None:
        super().__init__(desk, frame["id"])
        script, env = get(frame, "script", str), get_env(frame)
        desk.add(self)
        warmed.script = script
        warmed.env.update(env)
        warmed.warm(self._answered)

    def _answered(self, answer: Frame) -> None:
        self.event(**{"name": answer.pop("ev"), **answer})
        self.desk.drop(self)


class Wake(Request):
    """Makes a child its own machine, in a fixed order, and says so only when all of it is done."""

    def __init__(self, desk: Desk, frame: Frame, *, privileged: bool) -> None:
        super().__init__(desk, frame["id"])
        self._entropy = _entropy(frame)
        self._realtime_ns: int = get(frame, "realtime_ns", int)
        self._hostname = _text(frame, "hostname", 1, 64, "abcdefghijklmnopqrstuvwxyz0123456789-")
        self._machine_id = _text(frame, "machine_id", 32, 32, "0123456789abcdef")
        self._boot_id = _text(frame, "boot_id", 36, 36, "0123456789abcdef-")
        self._privileged = privileged
        desk.add(self)

    def run(self, warmed: Warmed, done: Callable[[str], None]) -> None:
        """`done` gets what went wrong, or nothing."""
        self._done = done
        if self._privileged:
            for name, step in self._steps():
                try:
                    step()
                except (OSError, ValueError, OverflowError) as e:
                    self._stop(f"wake step {name!r} failed: {e}")
                    return
        self._clock_ns = time.time_ns()
        try:
            warmed.call("wake", {}, self._answered)
        except OSError as e:
            self._stop(f"wake step 'interpreter' failed: {e}")

    def _steps(self) -> list[tuple[str, Callable[[], None]]]:
        # Entropy first: nothing may draw from the captured generator once this child is its own.
        return [
            ("entropy", lambda: kernel.add_entropy(self._entropy)),
            ("clock", lambda: kernel.set_clock(self._realtime_ns)),
            ("hostname", lambda: kernel.set_hostname(self._hostname)),
            ("machine-id", lambda: kernel.set_machine_id(self._machine_id)),
            ("boot-id", lambda: kernel.set_boot_id(self._boot_id)),
        ]

    def _answered(self, answer: Frame) -> None:
        if answer["ev"] == "error":
            self._stop(f"wake step 'interpreter' failed: {answer['error']}")
            return
        self.end(ok=True, clock_ns=self._clock_ns)
        self._done("")

    def _stop(self, problem: str) -> None:
        self.fail("WakeFailed", problem)
        self._done(problem)


def _entropy(frame: Frame) -> bytes:
    try:
        seed = unpack_bytes(frame.get("entropy"))
    except ProtocolError as e:
        raise BadRequest(f"field 'entropy': {e}") from None
    if not 64 <= len(seed) <= 512:
        raise BadRequest("field 'entropy' must be 64 to 512 bytes")
    return seed


def _text(frame: Frame, name: str, shortest: int, longest: int, letters: str) -> str:
    value: str = get(frame, name, str)
    if not shortest <= len(value) <= longest or set(value) - set(letters):
        raise BadRequest(f"field {name!r} is not a valid {name.replace('_', ' ')}")
    return value
