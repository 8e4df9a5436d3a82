"""Bytes to a JSON value, or BadJson.

The standard parser admits things that JSON or the code behind it does not:
duplicate keys, NaN, infinities, lone surrogates. This one refuses them, so
that everything below the edge can encode what it was given.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from forkd.errors import BadJson

_HINT = "send one JSON value in UTF-8"


def loads(raw: bytes) -> Any:
    if not raw.strip(b" \t\r\n"):
        raise BadJson("the body is empty", hint=_HINT)
    try:
        # Decoded here: json would guess UTF-16 and UTF-32, and skip a BOM.
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadJson("the body is not UTF-8", hint=_HINT) from None
    if text.startswith("\ufeff"):
        raise BadJson("the body starts with a byte order mark", hint="leave the mark out")
    try:
        value = _DECODER.decode(text)
    except BadJson:
        raise
    except RecursionError:
        raise BadJson("the body is nested too deep") from None
    except json.JSONDecodeError as e:
        raise BadJson(f"the body is not JSON: {e.msg} at byte {e.pos}", hint=_HINT) from None
    except ValueError:  # an integer of more digits than Python converts
        raise BadJson("the body holds a number that is too long") from None
    # Only escapes can bring these two in; most bodies have none and skip the walk.
    if "\\u" in text:
        _check_strings(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise BadJson(f"the key {twice[:64]!a} appears twice in one object")
    return found


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise BadJson("the body holds a number that is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise BadJson(f"the body holds {name}, which JSON does not have")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def _check_strings(value: Any) -> None:
    todo = [value]
    while todo:
        match todo.pop():
            case str() as text:
                if "\0" in text or not _encodable(text):
                    raise BadJson("a string holds a NUL or half of a surrogate pair")
            case list() as items:
                todo.extend(items)
            case dict() as fields:
                todo.extend(fields.keys())
                todo.extend(fields.values())


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
