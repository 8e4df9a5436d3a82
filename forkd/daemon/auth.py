"""Who may ask: the token file's rules and the check of every request.

A request over the Unix socket needs no token: the socket's file mode (0600)
is its proof. `/healthz` is open, so that probes need no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from forkd.daemon.replies import error_reply
from forkd.errors import BadField, Unauthorized

MIN_TOKEN_BYTES = 16
_MAX_FILE_BYTES = 64 * 1024
_PLACEHOLDERS = (b"REPLACE_ME", b"CHANGE_ME")
_GENERATE = "`(umask 077; openssl rand -base64 32 > FILE)` makes a good one"

# Compared before percent-decoding: `/%68ealthz` and `/healthz%2f..` are not these.
_OPEN_PATHS = (b"/healthz", b"/healthz/")


def read_token(path: Path) -> bytes:
    """The token, or BadField saying why the daemon will not run with this file."""
    try:
        # O_NONBLOCK: a FIFO put there must not hang the daemon.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise BadField("token_file", f"cannot open {path}: {e.strerror}", hint=_GENERATE) from e
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BadField("token_file", f"{path} is not a regular file")
        if found.st_mode & 0o006:
            raise BadField("token_file", f"{path} is open to everyone on this host", hint=f"chmod 600 {path}")
        token = file.read(_MAX_FILE_BYTES + 1).strip()
    _check_token(path, token)
    return token


def _check_token(path: Path, token: bytes) -> None:
    if not token:
        raise BadField("token_file", f"{path} holds no token", hint=_GENERATE)
    if token.startswith(_PLACEHOLDERS):
        raise BadField("token_file", f"{path} still holds the placeholder", hint=_GENERATE)
    if len(token) < MIN_TOKEN_BYTES:
        raise BadField(
            "token_file", f"the token in {path} is shorter than {MIN_TOKEN_BYTES} bytes", hint=_GENERATE
        )
    if not all(0x21 <= byte <= 0x7E for byte in token) or len(token) > _MAX_FILE_BYTES:
        raise BadField(
            "token_file", f"{path} holds more than one word of printable ASCII", hint="one token, one line"
        )


class Tokens:
    """The token that counts now; None of them when the daemon runs open on loopback."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._digest: bytes | None = None
        self.reload()

    @property
    def required(self) -> bool:
        return self._digest is not None

    def reload(self) -> None:
        """Read the file again. On failure: BadField, and the old token stays."""
        if self._path is not None:
            self._digest = hashlib.sha256(read_token(self._path)).digest()

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._digest is None:
            return
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or not given[0].startswith(b"Bearer "):
            raise Unauthorized("missing bearer token", hint="send `Authorization: Bearer <token>`")
        token = given[0].removeprefix(b"Bearer ").strip()
        if not token:
            raise Unauthorized("missing bearer token", hint="send `Authorization: Bearer <token>`")
        # Digests have one length, and bytes compare whatever they hold.
        if not hmac.compare_digest(hashlib.sha256(token).digest(), self._digest):
            raise Unauthorized("invalid bearer token", hint="the daemon's token file has the right one")


class AuthLayer:
    """Asks before anything is routed: a path that does not exist is 401 too."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"] not in _OPEN_PATHS and not scope["state"].get("unix"):
            try:
                self._tokens.check(scope["headers"])
            except Unauthorized as e:
                reply = error_reply(e, headers={"WWW-Authenticate": "Bearer"})
                await reply(scope, receive, send)
                return
        await self._app(scope, receive, send)
