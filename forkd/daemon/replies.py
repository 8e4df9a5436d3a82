"""How answers are written: JSON bodies, and every error in one shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from forkd.errors import AgentFailed, ForkdError, TooLarge, TooSlow


def json_bytes(value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise AgentFailed("reply", "the sandbox answered with a number that JSON does not have") from None
    # A guest can put half a surrogate pair into its output; the reply stays UTF-8 all the same.
    return text.encode("utf-8", "replace")


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_reply(
    error: ForkdError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    extra = dict(headers or {})
    if isinstance(error, TooLarge | TooSlow):
        extra["Connection"] = "close"  # what is left of the body must not be read as a request
    return json_reply(error.as_dict(), status or error.status, extra)
