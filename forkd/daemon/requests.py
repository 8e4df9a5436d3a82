"""What a request carries, read with caps and deadlines: JSON bodies, uploads, queries, path names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection
from urllib.parse import parse_qsl

from starlette.requests import Request

from forkd.daemon import strictjson
from forkd.daemon.context import context
from forkd.daemon.schemas import MAX_PATH_CHARS, AnyBody, validated
from forkd.errors import BadField, BadRequest, TooLarge, TooSlow, WrongContentType
from forkd.names import SandboxId, Tag

_MODE = re.compile(r"(?:0o?(?P<octal>[0-7]{1,4})|(?P<decimal>[0-9]{1,3}))", re.ASCII)


def tag_of(request: Request) -> Tag:
    return Tag(request.path_params["tag"])


def sandbox_id_of(request: Request) -> SandboxId:
    return SandboxId(request.path_params["sandbox_id"])


async def json_body(request: Request, model: type[AnyBody]) -> AnyBody:
    _check_content_type(request, "application/json", required=True)
    limits = context(request).limits
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_secs):
            async for chunk in _chunks(request, limits.body_bytes, None):
                raw += chunk
    except TimeoutError:
        raise _too_slow(limits.body_secs) from None
    return validated(model, strictjson.loads(bytes(raw)))


def upload(request: Request) -> AsyncIterator[bytes]:
    """The raw body, piece by piece. Refusals that need no byte of it are raised here, at once."""
    limits = context(request).limits
    _check_content_type(request, "application/octet-stream", required=False)
    _check_length(request, limits.file_bytes)
    return _chunks(request, limits.file_bytes, limits.body_secs)


async def _chunks(request: Request, cap: int, gap_secs: float | None) -> AsyncIterator[bytes]:
    _check_length(request, cap)
    total = 0
    while True:
        try:
            async with asyncio.timeout(gap_secs):
                message = await request.receive()
        except TimeoutError:
            if gap_secs is None:
                raise  # the caller's own deadline
            raise _too_slow(gap_secs) from None
        if message["type"] == "http.disconnect":
            raise BadRequest("the connection ended before the body did")
        chunk = message.get("body", b"")
        total += len(chunk)
        if total > cap:
            raise _too_large(cap)
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


def _check_length(request: Request, cap: int) -> None:
    # The protocol has made sure that it is one number; it may be one of many digits.
    declared = request.headers.get("content-length", "0").lstrip("0") or "0"
    if len(declared) > 18 or int(declared) > cap:
        raise _too_large(cap)


def _too_large(cap: int) -> TooLarge:
    return TooLarge(f"the body is over the cap of {cap} bytes", hint="send less, or in several requests")


def _too_slow(secs: float) -> TooSlow:
    return TooSlow(f"the body did not arrive within {secs:g} s", hint="send it again, faster")


def _check_content_type(request: Request, wanted: str, *, required: bool) -> None:
    given = request.headers.get("content-type")
    if given is None and not required:
        return
    kind, _, parameters = (given or "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != wanted or charset not in ("", "charset=utf-8"):
        raise WrongContentType(
            f"the body's content type is {(given or 'missing')[:80]!a}",
            hint=f"send `Content-Type: {wanted}`",
        )


def query_of(request: Request, known: Collection[str]) -> dict[str, str]:
    """The query's parameters, each known and given once."""
    raw = request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(raw, keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:  # UnicodeDecodeError is one
        raise BadRequest("the query string is not valid UTF-8, or too long") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise BadField(name[:80], "is not a known query parameter", hint=f"known: {', '.join(known)}")
        if name in found:
            raise BadField(name, "is given twice")
        found[name] = value
    return found


def flag(query: dict[str, str], name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise BadField(name, "must be true or false")
    return value == "true"


def file_path(query: dict[str, str]) -> str:
    path = query.get("path", "")
    if not path:
        raise BadField("path", "is required", hint="?path=/where/in/the/sandbox")
    if "\0" in path or len(path) > MAX_PATH_CHARS:
        raise BadField("path", f"holds a NUL or is over {MAX_PATH_CHARS} characters")
    return path


def file_mode(query: dict[str, str]) -> int | None:
    """Octal after a leading zero, else decimal: a bare 644 is over 511 and taken for neither."""
    text = query.get("mode")
    if text is None:
        return None
    match = _MODE.fullmatch(text)
    mode = -1
    if match and match["octal"] is not None:
        mode = int(match["octal"], 8)
    elif match and int(match["decimal"]) <= 0o777:
        mode = int(match["decimal"])
    if mode < 0:
        raise BadField("mode", "must be permission bits", hint="octal with a leading 0, as in 0644")
    return mode
