"""The wire between host and guest: one JSON object a line, many requests on one stream.

    host -> guest   {"id": 7, "op": "exec", "args": ["ls"]}      opens request 7
                    {"id": 7, "op": "data", "b": "<base64>"}      more input for it (stdin, file bytes)
                    {"id": 7, "op": "eof"}                        its input is complete
                    {"id": 7, "op": "signal", "sig": 15}          a signal for what it runs
                    {"id": 7, "op": "cancel"}                     kill what it runs, end it
    guest -> host   {"id": 7, "ev": "out", "fd": 1, "b": "..."}   some output
                    {"id": 7, "ev": "end", ...}                   done, with the result's fields
                    {"id": 7, "ev": "error", "type": "...", "error": "..."}   failed

Lines rather than length-prefixed frames, because either side can vanish
mid-frame (a daemon is killed, a guest is captured and restored elsewhere) and a
newline is a resynchronisation point that needs no history: a host that attaches
sends "\n" and a `hello` with a fresh nonce, and drops whatever it reads until
that nonce comes back.

Both sides treat the other's bytes as hostile: a line is capped, parsed as plain
JSON, and anything else is a `ProtocolError`. Standard library only: this file
runs inside the guest too.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterator
from typing import Any

CHUNK_BYTES = 48 * 1024  # raw bytes in one frame's "b"
MAX_LINE_BYTES = 128 * 1024  # a whole line: a full chunk in base64, plus its fields, twice over
VERSION = 1

Frame = dict[str, Any]


class ProtocolError(Exception):
    """The peer sent something that is not a frame."""


def encode(frame: Frame) -> bytes:
    line = json.dumps(frame, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"frame of {len(line)} bytes is over the cap of {MAX_LINE_BYTES}")
    return line


def decode(line: bytes) -> Frame:
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"not a frame: {type(e).__name__}") from None
    if not isinstance(frame, dict):
        raise ProtocolError("not a frame: not an object")
    number = frame.get("id")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**53:
        raise ProtocolError("not a frame: no valid id")
    return frame


def pack_bytes(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def unpack_bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise ProtocolError("bytes field is not text")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (ValueError, binascii.Error):
        raise ProtocolError("bytes field is not base64") from None


class LineBuffer:
    """Cuts a byte stream into lines, never holding more than one capped line."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each complete line without its newline; a line over the cap raises ProtocolError."""
        self._held += data
        start = 0
        while (end := self._held.find(b"\n", start)) >= 0:
            if end - start > self._limit:
                self._held.clear()
                raise ProtocolError("line over the cap")
            yield bytes(self._held[start:end])
            start = end + 1
        del self._held[:start]
        if len(self._held) > self._limit:
            self._held.clear()
            raise ProtocolError("line over the cap")
