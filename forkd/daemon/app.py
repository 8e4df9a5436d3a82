"""The app: routes, and the layers every request passes on its way to them.

    audit > hosts > token > audit gate > path > routes

Owns how errors become replies. What a route does is in `sandboxes`,
`snapshots` and `general`; sockets and signals are in `server`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from forkd import __version__
from forkd.daemon import general, sandboxes, snapshots
from forkd.daemon.audit import AuditGate, AuditLayer, AuditLog
from forkd.daemon.auth import AuthLayer, Tokens
from forkd.daemon.context import Context
from forkd.daemon.hosts import Bind, HostLayer
from forkd.daemon.openapi import document
from forkd.daemon.replies import error_reply
from forkd.errors import BadRequest, ForkdError, NotFound, WrongMethod


def routed(context: Context | None = None) -> FastAPI:
    """The bare routes. Without a context they can only describe themselves."""
    app = FastAPI(
        title="forkd",
        version=__version__,
        openapi_url=None,  # served by `general`, behind the same checks as the rest
        redirect_slashes=False,
        exception_handlers={
            ForkdError: _forkd_error,
            HTTPException: _router_error,
            Exception: _unforeseen,
        },
    )
    app.include_router(general.router)
    app.include_router(snapshots.router)
    app.include_router(sandboxes.router)
    app.state.context = context
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(document(app))
        return made

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def make_app(
    context: Context, log: AuditLog, tokens: Tokens, bind: Bind | None, allowed_hosts: tuple[str, ...]
) -> ASGIApp:
    app: ASGIApp = PathLayer(routed(context))
    app = AuditGate(app, log)
    app = AuthLayer(app, tokens)
    app = HostLayer(app, bind, allowed_hosts)
    return AuditLayer(app, log, context.metrics)


class PathLayer:
    """Refuses paths that read differently before and after decoding, so that no route sees one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _misleading(scope["raw_path"]):
            error = BadRequest("this path is not one the daemon reads", hint="see /openapi.json")
            await error_reply(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _misleading(raw: bytes) -> bool:
    if not raw.startswith(b"/"):
        return True
    decoded = unquote_to_bytes(raw)
    if decoded.count(b"/") != raw.count(b"/") or b"\\" in decoded:
        return True
    if any(byte < 0x20 or byte == 0x7F for byte in decoded):
        return True  # a route's `$` would let a newline by
    try:
        decoded.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False


async def _forkd_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ForkdError)
    return error_reply(error)


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path[:80])
    if error.status_code == 405:
        allowed = _methods_at(request)
        return error_reply(
            WrongMethod(f"{path} does not take {request.method[:16]}", hint=f"it takes {allowed}"),
            headers={"Allow": allowed},
        )
    return error_reply(NotFound(f"there is no {path}", hint="/openapi.json lists what there is"))


def _methods_at(request: Request) -> str:
    # Starlette names the methods of the first route of that path alone.
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


async def _unforeseen(_: Request, error: Exception) -> Response:
    # The traceback goes to the daemon's own log; the type is enough to find it there.
    return error_reply(
        ForkdError(f"the daemon failed: {type(error).__name__}", hint="its log has the details"),
        headers={"Connection": "close"},
    )
