"""What is being done for the attached host: the table of open requests, and the checks of their fields.

A host that goes away leaves its requests behind: they are taken off the table, and
whatever they still have to say finds no listener.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from forkd_agent.channel import Channel
from forkd_agent.protocol import Frame, ProtocolError

_REQUIRED = object()
_ERROR_CHARS = 2000


class BadRequest(Exception):
    """The host asked for something that is not in the protocol."""


def get(frame: Frame, name: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
    """A field of the right type. With a default it may be absent or null; a bool is never a number."""
    value = frame.get(name)
    if value is None and default is not _REQUIRED:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(k.__name__ for k in kinds)
        given = "missing" if value is None else type(value).__name__
        raise BadRequest(f"field {name!r} must be {wanted}, not {given}")
    return value


def get_seconds(frame: Frame, name: str) -> float | None:
    value = get(frame, name, (int, float), None)
    if value is None:
        return None
    if not math.isfinite(value) or not 0 < value < 1e9:
        raise BadRequest(f"field {name!r} must be a positive number of seconds")
    return float(value)


def get_count(frame: Frame, name: str, default: int | None) -> int | None:
    value = get(frame, name, int, default)
    if value is not None and not 0 <= value < 2**63:
        raise BadRequest(f"field {name!r} must be 0 or more")
    return value  # type: ignore[no-any-return]


def get_env(frame: Frame) -> dict[str, str]:
    env: dict[str, str] = get(frame, "env", dict, {})
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or not isinstance(value, str) or "\0" in value:
            raise BadRequest(f"field 'env': {key[:80]!r} is not a name with a text value")
    return env


class Request:
    """One open request. A kind that takes input or runs something overrides what it understands."""

    def __init__(self, desk: Desk, number: int) -> None:
        self.desk = desk
        self.number = number

    @property
    def attached(self) -> bool:
        return self.desk.holds(self)

    def data(self, chunk: bytes) -> None:
        """More input."""

    def eof(self) -> None:
        """The input is complete."""

    def signal(self, number: int) -> None:
        """A signal for what this runs."""

    def cancel(self) -> None:
        """The host wants no result."""
        self.fail("Cancelled", "cancelled by the host")

    def detach(self) -> None:
        """The host is gone. Called after the request left the table."""

    def event(self, name: str, **fields: Any) -> None:
        self.desk.say(self, {"id": self.number, "ev": name, **fields})

    def end(self, **fields: Any) -> None:
        self.event("end", **fields)
        self.desk.drop(self)

    def fail(self, kind: str, text: str, **fields: Any) -> None:
        self.event("error", type=kind, error=plain(text)[:_ERROR_CHARS], **fields)
        self.desk.drop(self)

    def fail_with(self, error: BaseException, what: str = "") -> None:
        self.fail(type(error).__name__, f"{what}: {reason(error)}" if what else reason(error))


class Desk:
    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._open: dict[int, Request] = {}

    @property
    def full(self) -> bool:
        return self._channel is not None and self._channel.full

    @property
    def count(self) -> int:
        return len(self._open)

    def attach(self, channel: Channel | None) -> None:
        """Serve another host, or none; the requests of the earlier one run on unheard."""
        left, self._open = self._open, {}
        self._channel = channel
        for request in left.values():
            request.detach()

    def add(self, request: Request) -> None:
        self._open[request.number] = request

    def find(self, number: int) -> Request | None:
        return self._open.get(number)

    def holds(self, request: Request) -> bool:
        return self._open.get(request.number) is request

    def drop(self, request: Request) -> None:
        if self.holds(request):
            del self._open[request.number]

    def say(self, request: Request, frame: Frame) -> None:
        if self._channel is None or not self.holds(request):
            return
        try:
            self._channel.send(frame)
        except ProtocolError as e:
            self._channel.send({"id": request.number, "ev": "error", "type": "TooLarge", "error": str(e)})
            self.drop(request)

    def when_drained(self, fn: Callable[[], None]) -> None:
        if self._channel is not None:
            self._channel.when_drained(fn)


def plain(text: str) -> str:
    """Lone surrogates are legal in a Python string and illegal nearly everywhere else."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
