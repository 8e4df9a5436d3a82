"""What the handlers share: one value per app, reached through the request."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from forkd.daemon.idempotency import Replays
from forkd.daemon.limits import Limits
from forkd.daemon.metrics import Metrics
from forkd.daemon.ports import RuntimeApi


@dataclass(frozen=True, slots=True)
class Fleet:
    """The answer to one spawn, ready to be sent, also more than once."""

    body: bytes
    server_timing: str


@dataclass(frozen=True, slots=True)
class Context:
    runtime: RuntimeApi
    metrics: Metrics
    limits: Limits
    replays: Replays[Fleet]


def context(request: Request) -> Context:
    found = request.app.state.context
    assert isinstance(found, Context)
    return found
