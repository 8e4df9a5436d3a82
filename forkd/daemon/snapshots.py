"""Routes about snapshots."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.context import context
from forkd.daemon.openapi import CASCADE, FORCE, TAG, described
from forkd.daemon.replies import error_reply, json_reply
from forkd.daemon.reply_schemas import SnapshotDetail, SnapshotInfo
from forkd.daemon.requests import flag, json_body, query_of, tag_of
from forkd.daemon.schemas import CreateSnapshotBody, StandbyBody
from forkd.errors import BadField, TagTaken

router = APIRouter(prefix="/v1/snapshots")


@router.get("", **described(list[SnapshotInfo]))
async def list_snapshots(request: Request) -> Response:
    found = sorted(context(request).runtime.snapshots(), key=lambda snapshot: snapshot.tag)
    return json_reply([snapshot.as_dict() for snapshot in found])


@router.post("", **described(SnapshotInfo, status=201, body=CreateSnapshotBody, errors=(404, 409, 507)))
async def create_snapshot(request: Request) -> Response:
    """Boot and warm a parent, and capture it."""
    wanted = (await json_body(request, CreateSnapshotBody)).parsed()
    try:
        made = await context(request).runtime.create_snapshot(wanted)
    except TagTaken as e:
        e.hint = f"delete snapshot {wanted.tag} first, or take another tag"
        return error_reply(e, status=400)  # the reference's status for this route
    return json_reply(made.as_dict(), 201)


@router.get("/{tag}/info", **described(SnapshotDetail, parameters=[TAG], errors=(404, 409)))
async def snapshot_info(request: Request) -> Response:
    return json_reply(context(request).runtime.snapshot_detail(tag_of(request)))


@router.delete("/{tag}", **described(status=204, parameters=[TAG, CASCADE, FORCE], errors=(404, 409)))
async def delete_snapshot(request: Request) -> Response:
    tag = tag_of(request)
    query = query_of(request, ("cascade", "force"))
    cascade, force = flag(query, "cascade"), flag(query, "force")
    if cascade and force:
        raise BadField("force", "does not go with cascade", hint="give one of them")
    await context(request).runtime.delete_snapshot(tag, cascade=cascade, force=force)
    return Response(status_code=204)


@router.put("/{tag}/standby", **described(status=204, parameters=[TAG], body=StandbyBody, errors=(404, 409)))
async def set_standby(request: Request) -> Response:
    """Keep this many loaded VMMs ready for the snapshot."""
    tag = tag_of(request)
    runtime = context(request).runtime
    runtime.snapshot(tag)
    body = await json_body(request, StandbyBody)
    await runtime.set_standby(tag, body.size)
    return Response(status_code=204)
