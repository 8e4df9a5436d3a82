"""QEMU's monitor, spoken from one thread at a time over its Unix socket.

docs/decisions/0001-own-qmp-client.md says why this is not the QEMU project's
asyncio client. The VMM's words are checked like any peer's: lines are capped
and a reply that is not an object ends the conversation.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forkd.errors import EngineFailed
from forkd.linux import sockets

_MAX_LINE = 1 << 20


class Qmp:
    def __init__(self, path: Path, *, timeout: float = 30) -> None:
        self._deadline = time.monotonic() + timeout
        self._events: list[str] = []
        try:
            self._sock = sockets.connect(path, timeout)
        except OSError as e:
            raise EngineFailed("connect to the VMM", str(e)) from e
        self._file = self._sock.makefile("rb")
        try:
            self._read()  # the greeting
            self.execute("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def execute(self, command: str, **arguments: Any) -> Any:
        request: dict[str, Any] = {"execute": command}
        if arguments:
            request["arguments"] = {k.replace("_", "-"): v for k, v in arguments.items()}
        try:
            self._sock.sendall(json.dumps(request).encode() + b"\n")
        except OSError as e:
            raise EngineFailed(command, f"the VMM is gone: {e}") from e
        while True:
            reply = self._read()
            if "event" in reply:
                self._events.append(str(reply["event"]))
            elif "error" in reply:
                raise EngineFailed(command, str(reply["error"].get("desc", reply["error"])))
            elif "return" in reply:
                return reply["return"]

    def wait_event(self, name: str) -> None:
        while name not in self._events:
            reply = self._read()
            if "event" in reply:
                self._events.append(str(reply["event"]))

    def _read(self) -> dict[str, Any]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise EngineFailed("wait for the VMM", "no answer in time")
        self._sock.settimeout(left)
        try:
            line = self._file.readline(_MAX_LINE)
            reply = json.loads(line) if line else None
        except (OSError, ValueError, RecursionError) as e:
            raise EngineFailed("read from the VMM", f"{type(e).__name__}: {e}") from e
        if not isinstance(reply, dict):
            raise EngineFailed("read from the VMM", "it closed the monitor" if not line else "not an object")
        return reply

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
