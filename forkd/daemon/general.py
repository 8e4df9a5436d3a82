"""Routes about the daemon itself and its host."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkd import __version__
from forkd.daemon.context import context
from forkd.daemon.metrics import CONTENT_TYPE
from forkd.daemon.openapi import described
from forkd.daemon.replies import json_reply
from forkd.daemon.reply_schemas import Health, HostReport, ImageInfo, Version
from forkd.models import Image

router = APIRouter()

_TEXT = {CONTENT_TYPE: {"schema": {"type": "string"}}}


@router.get("/healthz", **described(Health))
@router.get("/healthz/", include_in_schema=False)
async def healthz(_: Request) -> Response:
    return json_reply({"ok": True})


@router.get("/version", **described(Version))
async def version(_: Request) -> Response:
    return json_reply({"version": __version__, "api": "v1"})


@router.get("/metrics", **described(content=_TEXT))
async def metrics(request: Request) -> Response:
    # Set as a header: Response would add a charset to a text media type.
    return Response(context(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


@router.get("/openapi.json", **described(dict[str, Any]))
async def openapi(request: Request) -> Response:
    return json_reply(request.app.openapi())


@router.get("/v1/host", **described(HostReport))
async def host(request: Request) -> Response:
    """What this host can do, and why not."""
    return json_reply(await context(request).runtime.host_report())


@router.get("/v1/images", **described(list[ImageInfo]))
async def images(request: Request) -> Response:
    return json_reply([info for image in context(request).runtime.images() if (info := _image(image))])


def _image(image: Image) -> dict[str, Any] | None:
    try:
        disk_bytes = image.disk_bytes
    except FileNotFoundError:  # removed since it was listed
        return None
    return {
        "name": image.name,
        "key": image.key,
        "vcpus": image.machine.vcpus,
        "memory_mib": image.machine.memory_mib,
        "disk_bytes": disk_bytes,
        "created_at_unix": image.created_at_unix,
    }
