"""The agent: takes requests off the host's stream and starts each where it belongs.

In a guest it is PID 1's only child and serves the virtio port. With `--socket PATH`
it serves one connection at a time on a Unix socket, for tests on any machine.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Callable

from forkd_agent import kernel, stats
from forkd_agent.channel import Channel
from forkd_agent.evals import Eval, Wake, Warm, Warmed
from forkd_agent.execs import Runner
from forkd_agent.files import Read, Write
from forkd_agent.loop import IN, Loop
from forkd_agent.protocol import VERSION, Frame, ProtocolError, unpack_bytes
from forkd_agent.requests import BadRequest, Desk, Request, get, plain, reason
from forkd_agent.trees import Trees

CGROUPS = "/sys/fs/cgroup"
MAX_OPEN = 200  # requests at once
MAX_HELD = 256  # requests that may wait for a wake
_NONCE_CHARS = 256
_SIGNALS = range(1, 65)
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Agent:
    def __init__(self, loop: Loop, trees: Trees, *, privileged: bool) -> None:
        self._loop = loop
        self._privileged = privileged
        self._desk = Desk()
        self._warmed = Warmed(loop, shielded=privileged)
        self._runner = Runner(loop, self._desk, trees, dict(os.environ), shielded=privileged)
        self._channel: Channel | None = None
        self._waking = False
        self._wake_problem = ""
        self._held: deque[Frame] = deque()
        self._opens: dict[str, Callable[[Frame], object]] = {
            "hello": self._hello,
            "ping": self._ping,
            "warm": self._warm,
            "wake": self._wake,
            "eval": lambda f: Eval(self._desk, loop, self._warmed, f),
            "exec": self._runner.start,
            "read": lambda f: Read(self._desk, loop, f),
            "write": lambda f: Write(self._desk, f),
            "stats": self._stats,
        }
        self._inputs: dict[str, Callable[[Request, Frame], None]] = {
            "data": lambda r, f: r.data(unpack_bytes(f.get("b"))),
            "eof": lambda r, _: r.eof(),
            "signal": _signal,
            "cancel": lambda r, _: r.cancel(),
        }
        self._warmed.start()  # before the host's port is open, so that the copy never holds it

    def serve(self, rfd: int, wfd: int, on_down: Callable[[], None], *, port: bool = False) -> Channel:
        self._channel = Channel(self._loop, rfd, wfd, self.take, on_down, port=port)
        return self._channel

    def detach(self) -> None:
        self._desk.attach(None)

    def take(self, frame: Frame) -> None:
        """One frame from the host. Raises nothing: what is wrong with it is told to the host."""
        if self._waking and frame.get("op") != "hello":
            if len(self._held) < MAX_HELD:
                self._held.append(frame)
            else:
                self._refuse(frame, "Busy", f"{MAX_HELD} requests are waiting for the wake already")
            return
        try:
            self._dispatch(frame)
        except (BadRequest, ProtocolError) as e:
            self._refuse(frame, "BadRequest", str(e))
        except Exception as e:  # one bad request must not take the sandbox down
            self._refuse(frame, type(e).__name__, reason(e))

    def _dispatch(self, frame: Frame) -> None:
        op = get(frame, "op", str)
        if op in self._inputs:
            request = self._desk.find(frame["id"])
            if request is not None:  # or it has just ended, which the host will see
                self._inputs[op](request, frame)
            return
        start = self._opens.get(op)
        if start is None:
            raise BadRequest(f"unknown op {op[:40]!r}")
        if self._wake_problem and op not in ("hello", "ping", "wake"):
            self._refuse(frame, "NotAwake", self._wake_problem)
            return
        if op != "hello" and self._desk.find(frame["id"]) is not None:
            raise BadRequest(f"request {frame['id']} is still open")
        if self._desk.count >= MAX_OPEN and op not in ("hello", "wake"):
            self._refuse(frame, "Busy", f"{MAX_OPEN} requests are open already; wait for some to end")
            return
        start(frame)

    def _refuse(self, frame: Frame, kind: str, text: str) -> None:
        request = self._desk.find(frame["id"])
        if request is None:
            request = self._answer_to(frame)
        request.fail(kind, text)
        # If it was open before, the host now takes it for ended: so it must be, and not run on unheard.
        request.cancel()
        request.detach()

    def _answer_to(self, frame: Frame) -> Request:
        request = Request(self._desk, frame["id"])
        self._desk.add(request)
        return request

    def _hello(self, frame: Frame) -> None:
        nonce = get(frame, "nonce", str)
        if len(nonce) > _NONCE_CHARS or self._channel is None:
            raise BadRequest(f"field 'nonce' must be at most {_NONCE_CHARS} characters")
        self._held.clear()  # asked by a host that is gone
        self._channel.reset()
        self._desk.attach(self._channel)
        self._answer_to(frame).end(
            nonce=plain(nonce), version=VERSION, pid=os.getpid(), warm=self._warmed.ready
        )

    def _ping(self, frame: Frame) -> None:
        if self._warmed.numpy_version is None:
            self._warmed.numpy_version = _installed_numpy()
        self._answer_to(frame).end(
            pong=True,
            numpy_version=self._warmed.numpy_version,
            pid=os.getpid(),
            agent_lang="python",
            warmup_ready=self._warmed.ready,
        )

    def _stats(self, frame: Frame) -> None:
        dropped = self._channel.dropped if self._channel else 0
        fields = stats.collect()
        self._answer_to(frame).end(**fields, dropped_lines=dropped)

    def _warm(self, frame: Frame) -> None:
        Warm(self._desk, self._warmed, frame)
        self._runner.env.update(self._warmed.env)
        # What lives by now lives for good: kept out of collections, its pages stay shared by all children.
        gc.collect()
        gc.freeze()

    def _wake(self, frame: Frame) -> None:
        request = Wake(self._desk, frame, privileged=self._privileged)
        self._waking = True
        request.run(self._warmed, self._awake)

    def _awake(self, problem: str) -> None:
        self._waking = False
        self._wake_problem = problem
        held, self._held = self._held, deque()
        for frame in held:
            self.take(frame)


def _signal(request: Request, frame: Frame) -> None:
    number = get(frame, "sig", int)
    if number not in _SIGNALS:
        raise BadRequest(f"field 'sig' must be a signal number, not {number}")
    request.signal(number)


def _installed_numpy() -> str:
    """Read off the folder of its metadata: importing it here would cost the memory of a second copy."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("numpy-") and name.endswith((".dist-info", ".egg-info")):
                return name[len("numpy-") :].rpartition(".")[0].partition("-")[0]
    return "not-installed"


def serve_guest() -> None:
    """Called by init in its child. Returns only by an exception, which ends the machine."""
    kernel.name_process("forkd-agent")
    kernel.shield_from_oom(os.getpid(), shielded=True)
    os.environ.setdefault("PATH", _USUAL_PATH)
    os.environ.setdefault("LANG", "C.UTF-8")
    if os.environ.get("HOME", "/") == "/":
        os.environ["HOME"] = "/root"
    loop = Loop()
    trees = Trees(CGROUPS if os.path.exists(f"{CGROUPS}/cgroup.procs") else None)
    agent = Agent(loop, trees, privileged=True)
    fd = os.open(kernel.find_port(), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    agent.serve(fd, fd, agent.detach, port=True)
    loop.run()


def serve_socket(path: str, *, privileged: bool, cgroups: str | None) -> None:
    import socket

    loop = Loop()
    agent = Agent(loop, Trees(cgroups), privileged=privileged)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)

    def accept(_events: int) -> None:
        loop.unwatch(listener.fileno())
        fd = listener.accept()[0].detach()
        channel = agent.serve(fd, fd, lambda: down(channel))

    def down(channel: Channel) -> None:
        agent.detach()
        channel.close()
        loop.watch(listener.fileno(), IN, accept)

    loop.watch(listener.fileno(), IN, accept)
    loop.run()


def main(argv: list[str]) -> None:
    usage = "usage: python -m forkd_agent.main --socket PATH [--no-kernel] [--cgroup FOLDER]"
    options: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if word == "--no-kernel":
            options[word] = ""
        elif word in ("--socket", "--cgroup"):
            options[word] = next(words, "")
        else:
            sys.exit(usage)
    if not options.get("--socket"):
        sys.exit(usage)
    privileged = "--no-kernel" not in options
    serve_socket(options["--socket"], privileged=privileged, cgroups=options.get("--cgroup"))


if __name__ == "__main__":
    main(sys.argv[1:])
