"""The host's end of one sandbox's agent channel, on the daemon's event loop.

Owns the stream and hands frames to the request they belong to. What the guest
sends is hostile: lines are capped, unknown ids dropped, queues bounded, and a
guest that breaks the protocol loses its link, nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from forkd.errors import AgentFailed
from forkd.linux import sockets
from forkd_agent.protocol import MAX_LINE_BYTES, Frame, ProtocolError, decode, encode

_QUEUED_FRAMES = 64  # per request; a consumer that lags behind this slows its own sandbox only
_HELLO_EVERY_SECS = 0.25


class AgentLink:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._open: dict[int, asyncio.Queue[Frame]] = {}
        self._next = 1
        self._broken: str | None = None
        self._pump = asyncio.get_running_loop().create_task(self._read_frames())

    @classmethod
    async def connect(cls, path: Path) -> AgentLink:
        try:
            sock = sockets.connect(path)
            sock.setblocking(False)
            return cls(*await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE_BYTES))
        except OSError as e:
            raise AgentFailed("connect to the agent", str(e)) from e

    async def hello(self, timeout: float) -> Frame:
        """Agree on where the stream starts. Repeated, because a port nobody has opened yet swallows it."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_HELLO_EVERY_SECS):
                            return await self._hello()
        except TimeoutError:
            raise AgentFailed("wait for the agent", f"no answer within {timeout:.0f} s") from None

    async def _hello(self) -> Frame:
        nonce = secrets.token_hex(8)
        await self._write(b"\n")
        async with self.request("hello", nonce=nonce) as events:
            async for event in events:
                if event.get("nonce") == nonce:
                    return event
        raise AgentFailed("wait for the agent", "the channel closed")

    async def call(
        self, op: str, *, timeout: float, on: Callable[[Frame], None] | None = None, **values: Any
    ) -> Frame:
        """One request to its end; frames on the way go to `on`. A guest-side error comes back as its frame."""
        try:
            async with asyncio.timeout(timeout), self.request(op, **values) as events:
                async for event in events:
                    if event.get("ev") in ("end", "error"):
                        return event
                    if on is not None:
                        on(event)
        except TimeoutError:
            raise AgentFailed(op, f"the agent did not answer within {timeout:.0f} s") from None
        raise AgentFailed(op, self._broken or "the channel closed")

    @contextlib.asynccontextmanager
    async def request(self, op: str, **values: Any) -> AsyncIterator[AsyncIterator[Frame]]:
        number, self._next = self._next, self._next + 1
        queue: asyncio.Queue[Frame] = asyncio.Queue(_QUEUED_FRAMES)
        self._open[number] = queue
        ended = False

        async def events() -> AsyncIterator[Frame]:
            nonlocal ended
            while not ended:
                if self._broken and queue.empty():
                    raise AgentFailed(op, self._broken)
                frame = await queue.get()
                ended = frame.get("ev") in ("end", "error")
                if frame.get("ev") == "lost":
                    raise AgentFailed(op, self._broken or "the channel closed")
                yield frame

        try:
            # A field named like a parameter here (timeout) arrives with a trailing underscore.
            fields = {name.rstrip("_"): value for name, value in values.items()}
            await self._write(encode({"id": number, "op": op, **fields}))
            yield events()
        finally:
            del self._open[number]
            if not ended and not self._broken and op != "hello":
                self._writer.write(encode({"id": number, "op": "cancel"}))

    async def send(self, number: int, op: str, **values: Any) -> None:
        await self._write(encode({"id": number, "op": op, **values}))

    @property
    def last_id(self) -> int:
        """The id of the request opened last, for its follow-up frames."""
        return self._next - 1

    async def _write(self, data: bytes) -> None:
        if self._broken:
            raise AgentFailed("write to the agent", self._broken)
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as e:
            self._fail(f"the channel closed: {e}")
            raise AgentFailed("write to the agent", str(e)) from e

    async def _read_frames(self) -> None:
        try:
            while line := await self._reader.readuntil(b"\n"):
                try:
                    frame = decode(line)
                except ProtocolError:
                    continue  # half a line from before the hello, or noise: neither names a request
                if queue := self._open.get(frame["id"]):
                    await queue.put(frame)
        except (asyncio.IncompleteReadError, OSError):
            self._fail("the channel closed")
        except (asyncio.LimitOverrunError, ValueError):
            self._fail("the guest broke the protocol: a line over the cap")

    def _fail(self, why: str) -> None:
        self._broken = self._broken or why
        for number, queue in self._open.items():
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait({"id": number, "ev": "lost"})
        self._writer.close()

    async def close(self) -> None:
        self._fail("closed by the host")
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
