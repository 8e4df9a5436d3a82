"""The OpenAPI document: what each route says about itself, and how it is put together.

Handlers take the bare request (parsing is ours, strictly), so FastAPI cannot
read bodies and parameters off their signatures; `described` states them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from forkd.daemon.reply_schemas import Error
from forkd.daemon.schemas import BODIES, MAX_PATH_CHARS, SANDBOX_ID_SCHEMA, TAG_SCHEMA, Body

_REF = "#/components/schemas/{model}"
_EVERYWHERE = (400, 401, 403, 500, 503)  # any route: bad path, token, Host, our fault, too many connections
_BODY_ERRORS = (408, 413, 415)

Json = dict[str, Any]


def _parameter(name: str, where: str, schema: Mapping[str, Any], text: str = "") -> Json:
    found: Json = {"name": name, "in": where, "required": where == "path", "schema": dict(schema)}
    return found | ({"description": text} if text else {})


TAG = _parameter("tag", "path", TAG_SCHEMA)
SANDBOX_ID = _parameter("sandbox_id", "path", SANDBOX_ID_SCHEMA)
CASCADE = _parameter("cascade", "query", {"type": "boolean", "default": False}, "Delete its dependents too.")
FORCE = _parameter("force", "query", {"type": "boolean", "default": False}, "Delete it from under them.")
FILE_PATH = _parameter(
    "path", "query", {"type": "string", "minLength": 1, "maxLength": MAX_PATH_CHARS}, "In the sandbox."
) | {"required": True}
FILE_MODE = _parameter(
    "mode",
    "query",
    {"type": "string", "pattern": "^(0o?[0-7]{1,4}|[0-9]{1,3})$"},
    "Permission bits: octal with a leading 0 (0644), else decimal up to 511 (420).",
)
IDEMPOTENCY_KEY = _parameter(
    "Idempotency-Key",
    "header",
    {"type": "string", "minLength": 1, "maxLength": 255},
    "Requests with one key make one fleet and get one answer, for a day or until the daemon restarts.",
)


def described(
    reply: Any = None,
    *,
    errors: Iterable[int] = (),
    body: type[Body] | None = None,
    content: Json | None = None,
    raw_body: bool = False,
    parameters: Iterable[Json] = (),
    status: int = 200,
    headers: Json | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a route decorator: one reply on success, Error on everything else."""
    success: Json = {"description": HTTPStatus(status).phrase}
    if reply is not None:
        success["model"] = reply
    if content is not None:
        success["content"] = content
    if headers is not None:
        success["headers"] = headers
    codes = {*errors, *_EVERYWHERE, *(_BODY_ERRORS if body or raw_body else ())}
    extra: Json = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        schema = {"$ref": _REF.format(model=body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if raw_body:
        extra["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    failures = {code: {"model": Error, "description": HTTPStatus(code).phrase} for code in sorted(codes)}
    return {
        "status_code": status,
        "responses": {status: success, **failures},
        "response_model": None,
        "openapi_extra": extra,
    }


def document(app: FastAPI) -> Json:
    """The whole document. Made once per app: routes do not change while it runs."""
    made: Json = get_openapi(
        title="forkd",
        version=app.version,
        summary="Fork warmed sandboxes in milliseconds.",
        description=(
            "Bodies are strict JSON: unknown fields, duplicate keys and wrong types are refused with 400. "
            "Every error has the shape of `Error`. With a token file, every path but /healthz needs "
            "`Authorization: Bearer <token>`, except over the Unix socket, whose file mode is the proof."
        ),
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    _, bodies = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF)
    components = made.setdefault("components", {})
    components.setdefault("schemas", {}).update(bodies["$defs"])
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path.startswith("/healthz") else [{"token": []}, {}]
    return made
