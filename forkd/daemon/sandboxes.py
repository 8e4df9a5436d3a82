"""Routes about sandboxes: the fleet, and what runs inside one.

Whether the sandbox exists is asked before its body is read, so a client that
polls a gone sandbox learns that first.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from forkd.daemon.context import Fleet, context
from forkd.daemon.idempotency import checked_key
from forkd.daemon.openapi import FILE_MODE, FILE_PATH, IDEMPOTENCY_KEY, SANDBOX_ID, Json, described
from forkd.daemon.replies import json_bytes, json_reply
from forkd.daemon.reply_schemas import EvalReply, ExecReply, SandboxInfo, Written
from forkd.daemon.requests import file_mode, file_path, json_body, query_of, sandbox_id_of, upload
from forkd.daemon.schemas import EvalBody, ExecBody, SpawnBody
from forkd.errors import Unsupported
from forkd.models import SpawnRequest, SpawnTiming
from forkd.names import SandboxId, Tag

router = APIRouter(prefix="/v1/sandboxes")

_ONE: Json = {"parameters": [SANDBOX_ID], "errors": (404,)}
_LIVE: Json = {"parameters": [SANDBOX_ID], "errors": (404, 409)}
_TIMING: Json = {
    "Server-Timing": {"description": "running;dur=MS, ready;dur=MS", "schema": {"type": "string"}},
    "Idempotency-Replayed": {"description": "true: an earlier answer, again", "schema": {"type": "string"}},
}
_BYTES: Json = {"application/octet-stream": {}}


def _existing(request: Request) -> SandboxId:
    sandbox_id = sandbox_id_of(request)
    context(request).runtime.sandbox(sandbox_id)
    return sandbox_id


@router.get("", **described(list[SandboxInfo]))
async def list_sandboxes(request: Request) -> Response:
    found = sorted(context(request).runtime.sandboxes(), key=lambda sandbox: sandbox.id)
    return json_reply([sandbox.as_dict() for sandbox in found])


@router.post(
    "",
    **described(
        list[SandboxInfo],
        status=201,
        body=SpawnBody,
        errors=(404, 409, 507),
        parameters=[IDEMPOTENCY_KEY],
        headers=_TIMING,
    ),
)
async def spawn(request: Request) -> Response:
    """Fork n children; all of them, awake, or none."""
    body = await json_body(request, SpawnBody)
    wanted = body.parsed()
    key = request.headers.get("idempotency-key")
    if key is None:
        fleet, repeated = await _spawn(request, wanted, body.isolation), False
    else:
        fleet, repeated = await context(request).replays.once(
            checked_key(key), body.model_dump_json(), lambda: _spawn(request, wanted, body.isolation)
        )
    headers = {"Server-Timing": fleet.server_timing} | ({"Idempotency-Replayed": "true"} if repeated else {})
    return Response(fleet.body, 201, headers, media_type="application/json")


async def _spawn(request: Request, wanted: SpawnRequest, isolation: str | None) -> Fleet:
    shared = context(request)
    if isolation is not None:
        has = shared.runtime.snapshot(Tag(wanted.snapshot_tag)).isolation
        if has != isolation:
            raise Unsupported(
                f"snapshot {wanted.snapshot_tag} gives isolation {has}, not {isolation}",
                hint="spawn from another snapshot, or do not demand it",
            )
    with shared.metrics.spawn_seconds.time():
        made, timing = await shared.runtime.spawn(wanted)
    return Fleet(json_bytes([sandbox.as_dict() for sandbox in made]), _server_timing(timing))


def _server_timing(timing: SpawnTiming) -> str:
    return f"running;dur={timing.running_ms:.3f}, ready;dur={timing.ready_ms:.3f}"


@router.get("/{sandbox_id}", **described(SandboxInfo, **_ONE))
async def get_sandbox(request: Request) -> Response:
    return json_reply(context(request).runtime.sandbox(sandbox_id_of(request)).as_dict())


@router.delete("/{sandbox_id}", **described(status=204, **_ONE))
async def kill(request: Request) -> Response:
    await context(request).runtime.kill(sandbox_id_of(request))
    return Response(status_code=204)


@router.post("/{sandbox_id}/touch", **described(SandboxInfo, **_LIVE))
async def touch(request: Request) -> Response:
    """Start the time to live anew. A body is not read."""
    return json_reply(context(request).runtime.touch(sandbox_id_of(request)).as_dict())


@router.post("/{sandbox_id}/ping", **described(Json, **_LIVE))
async def ping(request: Request) -> Response:
    """The agent's own answer. A body is not read."""
    return json_reply(await context(request).runtime.ping(_existing(request)))


@router.get("/{sandbox_id}/stats", **described(Json, **_LIVE))
async def stats(request: Request) -> Response:
    return json_reply(await context(request).runtime.stats(_existing(request)))


@router.post("/{sandbox_id}/exec", **described(ExecReply, body=ExecBody, **_LIVE))
async def execute(request: Request) -> Response:
    """Run a program; a non-zero exit is an answer, not an error."""
    sandbox_id = _existing(request)
    wanted = (await json_body(request, ExecBody)).parsed()
    shared = context(request)
    with shared.metrics.exec_seconds.time():
        result = await shared.runtime.exec(sandbox_id, wanted)
    return json_reply(result.as_dict())


@router.post("/{sandbox_id}/eval", **described(EvalReply, body=EvalBody, **_LIVE))
async def evaluate(request: Request) -> Response:
    """Evaluate an expression in the warmed interpreter."""
    sandbox_id = _existing(request)
    body = await json_body(request, EvalBody)
    shared = context(request)
    with shared.metrics.eval_seconds.time():
        result = await shared.runtime.eval(sandbox_id, body.code, body.timeout_secs)
    return json_reply(result.as_dict())


@router.get(
    "/{sandbox_id}/files",
    **described(content=_BYTES, parameters=[SANDBOX_ID, FILE_PATH], errors=(404, 409, 413)),
)
async def read_file(request: Request) -> Response:
    """A file's bytes, as they come; a file that ends early breaks the connection."""
    sandbox_id = _existing(request)
    path = file_path(query_of(request, ("path",)))
    source = context(request).runtime.read_file(sandbox_id, path)
    # The first piece decides between a stream and an error, and an error needs its own status.
    first = await anext(source, b"")
    return StreamingResponse(_stream(first, source), media_type="application/octet-stream")


async def _stream(first: bytes, source: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(source, AsyncGenerator):
            await stack.enter_async_context(contextlib.aclosing(source))
        yield first
        async for piece in source:
            yield piece


@router.put(
    "/{sandbox_id}/files",
    **described(
        Written, raw_body=True, parameters=[SANDBOX_ID, FILE_PATH, FILE_MODE], errors=(404, 409, 507)
    ),
)
async def write_file(request: Request) -> Response:
    sandbox_id = _existing(request)
    query = query_of(request, ("path", "mode"))
    path, mode = file_path(query), file_mode(query)
    written = await context(request).runtime.write_file(sandbox_id, path, upload(request), mode)
    return json_reply({"path": path, "bytes": written})
