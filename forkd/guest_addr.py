"""`guest_addr`: a loopback port per sandbox that speaks the reference's one-shot agent protocol.

One JSON object and a newline in, one out, then the connection closes. Clients
written for an agent inside the guest reach it here without any guest network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from forkd import guest
from forkd.agent_link import AgentLink
from forkd.errors import ForkdError
from forkd.models import ExecRequest

_MAX_REQUEST_BYTES = 2 << 20
_REQUEST_SECS = 30


class GuestAddr:
    """The listener of one sandbox. `link` is asked for each time: it changes when a daemon re-attaches."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    @classmethod
    async def open(cls, link: Callable[[], AgentLink], port: int | None) -> GuestAddr:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                async with asyncio.timeout(_REQUEST_SECS):
                    line = await _one_line(reader)
                if line:
                    writer.write(json.dumps(await _answer(link, line)).encode() + b"\n")
                    await writer.drain()
            writer.close()

        try:
            server = await asyncio.start_server(serve, "127.0.0.1", port or 0, limit=_MAX_REQUEST_BYTES)
        except OSError:
            server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_MAX_REQUEST_BYTES)
        return cls(server)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        self._server.close()


async def _one_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as e:
        return e.partial  # a request may also end with the client's half of the connection
    except asyncio.LimitOverrunError:
        return b"{"  # answered as what it is: not a request


async def _answer(link: Callable[[], AgentLink], line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("a request is a JSON object")
        return await _act(link(), request)
    except (ValueError, RecursionError, ForkdError) as e:
        return {"error": f"{type(e).__name__}: {e}", "traceback": "", "exit_code": 1}


async def _act(link: AgentLink, request: dict[str, Any]) -> dict[str, Any]:
    match request.get("action"):
        case "ping":
            return await guest.ping(link)
        case "exec":
            args, timeout = request.get("args"), request.get("timeout", 30)
            if not isinstance(args, list) or not args or not all(isinstance(a, str) for a in args):
                raise ValueError("args must be a non-empty list of strings")
            if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86400:
                raise ValueError("timeout must be a number of seconds above 0")
            done = await guest.run(link, ExecRequest(args, timeout))
            return {"stdout": done.stdout, "stderr": done.stderr, "exit_code": done.exit_code}
        case "eval":
            code = request.get("code")
            if not isinstance(code, str):
                raise ValueError("code must be a string")
            found = await guest.evaluate(link, code, 30)
            if found.error is not None:
                return {"error": found.error, "traceback": found.traceback or "", "exit_code": 1}
            return {"result": found.result, "exit_code": found.exit_code}
        case other:
            return {"error": f"unknown action {str(other)[:80]!r}", "exit_code": 1}
