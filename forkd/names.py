"""Names that arrive as text and leave as types.

Every tag, image name and sandbox id is checked here once, at the edge; code
below the edge takes these types and never a raw string. They end up in file
paths, so the patterns admit nothing that a path could misread.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import ClassVar, Self

from forkd.errors import BadName

# `fullmatch` with explicit ASCII sets: `$` would admit a trailing newline and `\w` look-alike letters.
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SANDBOX_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class _Name:
    value: str

    kind: ClassVar[str] = "name"
    pattern: ClassVar[re.Pattern[str]] = _TAG
    rule: ClassVar[str] = "1 to 64 of A-Z a-z 0-9 _ -, not starting with -"

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or not self.pattern.fullmatch(self.value):
            raise BadName(self.kind, self.value, self.rule)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, order=True)
class Tag(_Name):
    """The name of a snapshot."""

    kind: ClassVar[str] = "tag"


@dataclass(frozen=True, slots=True, order=True)
class ImageName(_Name):
    """The name of an image: a kernel, an initrd and a root filesystem."""

    kind: ClassVar[str] = "image name"


@dataclass(frozen=True, slots=True, order=True)
class SandboxId(_Name):
    """The name of a sandbox. New ones carry 128 random bits, no clock and no counter."""

    kind: ClassVar[str] = "sandbox id"
    pattern: ClassVar[re.Pattern[str]] = _SANDBOX_ID
    rule: ClassVar[str] = "1 to 64 of A-Z a-z 0-9 _ -"

    @classmethod
    def new(cls) -> Self:
        return cls(f"sb-{secrets.token_hex(16)}")
