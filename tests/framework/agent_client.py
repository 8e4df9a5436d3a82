"""A real agent process on a Unix socket, and a small blocking client that speaks its frames.

For tests of the agent alone: no machine, no daemon, no event loop.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forkd_agent.protocol import Frame, LineBuffer, decode, encode, pack_bytes, unpack_bytes

DEADLINE_S = 20.0
REPO = Path(__file__).parents[2]


def wait_for(check: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until `check` gives something true; for states that nothing announces."""
    end = time.monotonic() + deadline_s
    while not (value := check()):
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.005)
    return value


def wait_until_still(sample: Callable[[], str], what: str, times: int = 20) -> None:
    """Poll until the sample has been the same so many times in a row; for work that stops without a sign."""
    seen: deque[str] = deque(maxlen=times)

    def still() -> bool:
        seen.append(sample())
        return len(seen) == times and len(set(seen)) == 1

    wait_for(still, what)


class AgentProcess:
    def __init__(self, folder: Path, *options: str, python: str = sys.executable) -> None:
        self.path = folder / "agent.sock"
        command = [python, "-m", "forkd_agent.main", "--socket", str(self.path), "--no-kernel", *options]
        env = {k: v for k, v in os.environ.items() if k != "FORKD_EXEC"}
        self.process = subprocess.Popen(command, cwd=REPO, env=env)
        wait_for(self._listening, "the agent listens")

    def _listening(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the agent exited with {self.process.returncode}")
        return self.path.exists()

    @property
    def pid(self) -> int:
        return self.process.pid

    def fds(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def children(self) -> list[int]:
        return [int(p) for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def stop(self) -> None:
        children = self.children() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not any(alive(pid) for pid in children), "the agent's children end with it")


class Client:
    """One attachment. Frames that are not waited for yet are kept by request id."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        wait_for(lambda: self._connect(path), "the agent accepts")
        self._lines = LineBuffer()
        self._kept: dict[int, deque[Frame]] = defaultdict(deque)
        self._last = 0
        self.order: list[int] = []  # the ids of all frames, as they came
        if hello:
            self.hello()

    def _connect(self, path: Path) -> bool:
        try:
            self.socket.connect(str(path))
        except (ConnectionRefusedError, BlockingIOError):
            return False
        return True

    def hello(self) -> Frame:
        """Attach as a host does: drop everything until the nonce comes back."""
        nonce = os.urandom(8).hex()
        self.raw(b"\n")
        number = self.send("hello", nonce=nonce)
        while True:
            frame = self.next(number)
            if frame.get("nonce") == nonce:
                self._kept.clear()
                return frame

    def close(self) -> None:
        self.socket.close()

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, op: str, /, **fields: Any) -> int:
        self._last += 1
        self.raw(encode({"id": self._last, "op": op, **fields}))
        return self._last

    def more(self, number: int, op: str, /, **fields: Any) -> None:
        self.raw(encode({"id": number, "op": op, **fields}))

    def feed(self, number: int, data: bytes) -> None:
        self.more(number, "data", b=pack_bytes(data))

    def next(self, number: int) -> Frame:
        """The next frame of that request."""
        while not self._kept[number]:
            self._receive()
        return self._kept[number].popleft()

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the agent closed the connection")
        for line in self._lines.feed(data):
            try:
                frame = decode(line)
            except Exception:
                continue  # the end of a line that an earlier host had half of
            self.order.append(frame["id"])
            self._kept[frame["id"]].append(frame)

    def finish(self, number: int) -> tuple[Frame, list[Frame]]:
        """The last frame of that request, and those before it."""
        before: list[Frame] = []
        while True:
            frame = self.next(number)
            if frame["ev"] in ("end", "error"):
                return frame, before
            before.append(frame)

    def call(self, op: str, /, **fields: Any) -> Frame:
        return self.finish(self.send(op, **fields))[0]

    def run(self, *args: str, **fields: Any) -> tuple[Frame, bytes, bytes]:
        """A command to its end: the last frame, stdout, stderr."""
        return self.output(self.send("exec", args=list(args), **fields))

    def output(self, number: int) -> tuple[Frame, bytes, bytes]:
        last, before = self.finish(number)
        return last, joined(before, 1), joined(before, 2)

    def eval(self, code: str, **fields: Any) -> Frame:
        return self.call("eval", code=code, **fields)

    def write_file(self, path: Path | str, content: bytes, **fields: Any) -> Frame:
        number = self.send("write", path=str(path), **fields)
        for start in range(0, len(content), 48 * 1024):
            self.feed(number, content[start : start + 48 * 1024])
        self.more(number, "eof")
        return self.finish(number)[0]

    def read_file(self, path: Path | str, **fields: Any) -> tuple[Frame, bytes]:
        last, before = self.finish(self.send("read", path=str(path), **fields))
        return last, b"".join(unpack_bytes(f["b"]) for f in before)


def joined(frames: list[Frame], fd: int) -> bytes:
    return b"".join(unpack_bytes(f["b"]) for f in frames if f["ev"] == "out" and f["fd"] == fd)


def alive(pid: int) -> bool:
    """Running, and not just waiting to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


WAKE = {
    "entropy": pack_bytes(bytes(range(64))),
    "realtime_ns": 1_700_000_000_000_000_000,
    "hostname": "sb-1",
    "machine_id": "0123456789abcdef" * 2,
    "boot_id": "01234567-89ab-cdef-0123-456789abcdef",
}


@contextmanager
def attached(folder: Path, *options: str) -> Iterator[tuple[AgentProcess, Client]]:
    agent = AgentProcess(folder, *options)
    try:
        client = Client(agent.path)
        try:
            yield agent, client
        finally:
            client.close()
    finally:
        agent.stop()
