"""The one-shot agent protocol: connect, send one JSON line, read one JSON object until the end.

For `Sandbox(spawn=False)` and the CLI's `--target`. The guest's bytes are not trusted: they are capped, and
parsed as plain JSON.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECS = 5.0
_MARGIN_SECS = 5.0
_REPLY_BYTES = 64 * 1024 * 1024


def split_target(target: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`."""
    try:
        parts = urlsplit(f"//{target}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise ValueError(f"target {target!r} is not host:port, as in 10.42.0.2:8888 or [::1]:8888")
    return host, port


class Agent:
    def __init__(self, target: str, timeout: float) -> None:
        self._target = target
        self._timeout = timeout

    def exec(
        self, args: list[str], timeout: float, env: Mapping[str, str] | None, cwd: str | None
    ) -> dict[str, Any]:
        request: dict[str, Any] = {"action": "exec", "args": args, "timeout": timeout}
        if env is not None:
            request["env"] = dict(env)
        if cwd is not None:
            request["cwd"] = cwd
        return self._ask(request)

    def eval(self, code: str) -> dict[str, Any]:
        return self._ask({"action": "eval", "code": code})

    def ping(self) -> dict[str, Any]:
        return self._ask({"action": "ping"})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        data = self._exchange(json.dumps(request).encode() + b"\n")
        if not data:
            raise RuntimeError(
                f"forkd: the agent at {self._target} closed without a reply; it may have crashed"
            )
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            shown = data[:200].decode(errors="replace")
            raise RuntimeError(f"forkd: what answers at {self._target} is not an agent; it said {shown!r}")
        return reply

    def _exchange(self, line: bytes) -> bytes:
        limit_secs = self._timeout + _MARGIN_SECS
        with socket.create_connection(split_target(self._target), timeout=_CONNECT_SECS) as sock:
            sock.settimeout(limit_secs)
            sock.sendall(line)
            sock.shutdown(socket.SHUT_WR)
            data = bytearray()
            try:
                while chunk := sock.recv(65536):
                    data += chunk
                    if len(data) > _REPLY_BYTES:
                        raise RuntimeError(
                            f"forkd: the reply from {self._target} is over {_REPLY_BYTES} bytes"
                        )
            except TimeoutError as e:
                raise TimeoutError(
                    f"forkd: no reply from the agent at {self._target} within {limit_secs:g} s"
                ) from e
        return bytes(data)
