"""uvicorn's HTTP/1.1 protocol, for clients that are slow, broken or hostile.

Adds what it leaves open: a deadline for the head and for a client that does not
read, a cap on connections, no request with two lengths, errors in our shape,
half-closed clients answered, and refusals that the client gets to read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forkd.daemon.limits import Limits
from forkd.daemon.replies import json_bytes
from forkd.errors import BadRequest, Busy, ForkdError


class _OneLength(h11.Connection):
    """Refuses a request that states its length twice: proxies disagree on which one counts."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


class _Lingering(asyncio.Transport):
    """A transport whose close() reads on for a moment while the client is still sending.

    Closing a socket with unread input resets the connection, and the reset can
    overtake the answer that says why.
    """

    def __init__(self, inner: asyncio.Transport, protocol: Http1, secs: float) -> None:
        super().__init__()
        self._inner = inner
        self._protocol = protocol
        self._secs = secs
        self.closing = False

    def close(self) -> None:
        if self.closing or self._inner.is_closing():
            return
        self.closing = True
        if not self._protocol.mid_request():
            self._inner.close()
            return
        self._inner.write_eof()
        self._inner.resume_reading()
        self._protocol.loop.call_later(self._secs, self._inner.close)

    def is_closing(self) -> bool:
        return self.closing or self._inner.is_closing()

    def abort(self) -> None:
        self.closing = True
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self.closing:
            self._inner.write(data)

    def pause_reading(self) -> None:
        if not self.closing:
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)


class Http1(H11Protocol):
    limits: ClassVar[Limits] = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _OneLength(h11.SERVER)
        self._head_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Lingering(transport, self, self.limits.linger_secs))
        found = transport.get_extra_info("socket")
        self.app_state = {"unix": found is not None and found.family == socket.AF_UNIX}
        if len(self.connections) > self.limits.connections:
            self._refuse(Busy("too many connections", hint="try again, and keep fewer open"))
            return
        self._head_timer = self.loop.call_later(self.limits.head_secs, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # lingering
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            # A next request has begun on a kept-alive connection.
            self._head_timer = self.loop.call_later(self.limits.head_secs, self.transport.close)
        if self._drain_timer is not None and self.conn.their_state is not h11.SEND_BODY:
            self._drain_timer = _cancelled(self._drain_timer)

    def eof_received(self) -> bool:
        """A client may close its sending side and wait: True keeps ours open for the answer."""
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            return False
        if self.conn.their_state is h11.SEND_BODY:
            self.send_400_response("the connection ended before the body did")
            return False
        self.cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancelled(self._head_timer)
        self._drain_timer = _cancelled(self._drain_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            # Answered without the body: what is left of it is thrown away, but not for ever.
            self._drain_timer = self.loop.call_later(self.limits.linger_secs, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_secs, self.transport.abort)

    def resume_writing(self) -> None:
        self._write_timer = _cancelled(self._write_timer)
        super().resume_writing()

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.close()

    def mid_request(self) -> bool:
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg, hint="the connection is closed; send one well-formed request"))

    def _refuse(self, error: ForkdError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_canned(error))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its handler must not write a second answer
            self.cycle.message_event.set()
        self.transport.close()


def hardened(limits: Limits) -> type[Http1]:
    return type("Http1", (Http1,), {"limits": limits})


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _canned(error: ForkdError) -> bytes:
    body = json_bytes(error.as_dict())
    head: Iterable[str] = (
        f"HTTP/1.1 {error.status} {'Bad Request' if error.status == 400 else 'Service Unavailable'}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(head).encode("ascii") + body
