"""Request bodies as they arrive: checked strictly, then turned into the values of `forkd.models`.

Names stay text here and become `Tag` in `parsed()`, so that a bad one is a
BadName wherever it comes from. Replies are described in `reply_schemas`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema

from forkd.errors import BadField
from forkd.models import Accel, CreateSnapshot, ExecRequest, SpawnRequest
from forkd.names import ImageName, Tag

MAX_ARG_BYTES = 128 * 1024  # Linux's own limit for one string of an execve
MAX_ARGS_BYTES = 1024 * 1024
MAX_PATH_CHARS = 4096
MAX_EXEC_SECS = 86400
MAX_COUNT = 2**31 - 1

TAG_SCHEMA = {"type": "string", "pattern": r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$"}
SANDBOX_ID_SCHEMA = {"type": "string", "pattern": r"^[A-Za-z0-9_-]{1,64}$"}

_TagText = Annotated[str, WithJsonSchema(TAG_SCHEMA)]
_PathText = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
_NoEffect = Annotated[bool, Field(description="Accepted for compatibility; has no effect.")]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SpawnBody(Body):
    snapshot_tag: _TagText
    n: int = Field(1, ge=1, le=1000)
    memory_limit_mib: int | None = Field(None, ge=1, le=MAX_COUNT)
    ttl_secs: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Killed this long after the last touch; null: never."
    )
    isolation: Literal["vm", "process"] | None = Field(
        None, description="Refuse (409) unless the snapshot's boundary is this one."
    )
    per_child_netns: _NoEffect = False
    prewarm: _NoEffect = False
    live_fork: _NoEffect = False
    hugepages: _NoEffect = False

    def parsed(self) -> SpawnRequest:
        return SpawnRequest(str(Tag(self.snapshot_tag)), self.n, self.memory_limit_mib, self.ttl_secs)


class CreateSnapshotBody(Body):
    """Exactly one of `image`, or `kernel` with `rootfs`."""

    tag: _TagText
    image: Annotated[str, WithJsonSchema(TAG_SCHEMA)] | None = None
    kernel: _PathText | None = Field(None, description="A path on the daemon's host, under an image root.")
    rootfs: _PathText | None = Field(None, description="A path on the daemon's host, under an image root.")
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    vcpus: int | None = Field(None, ge=1, le=16)
    memory_mib: int | None = Field(None, ge=64, le=65536)
    boot_wait_secs: int = Field(60, ge=0, le=60, description="The longest a boot and its warm-up may take.")
    rw: _NoEffect = False
    tap: Annotated[str | None, Field(description="Must be null: networks are not supported.")] = None

    def parsed(self) -> CreateSnapshot:
        tag = Tag(self.tag)
        self._check_source()
        if self.tap is not None:
            raise BadField("tap", "networks are not supported", hint="leave it out")
        return CreateSnapshot(
            tag=str(tag),
            image=None if self.image is None else str(ImageName(self.image)),
            kernel=None if self.kernel is None else Path(self.kernel),
            rootfs=None if self.rootfs is None else Path(self.rootfs),
            accel=Accel(self.accel),
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            boot_wait_secs=self.boot_wait_secs,
        )

    def _check_source(self) -> None:
        files = {"kernel": self.kernel, "rootfs": self.rootfs}
        given = [name for name, value in files.items() if value is not None]
        if self.image is not None and given:
            raise BadField(given[0], "does not go with image", hint="give image, or kernel and rootfs")
        if self.image is None and len(given) < 2:
            missing = next(name for name in files if name not in given)
            raise BadField(missing, "is required without image", hint="give image, or kernel and rootfs")


class StandbyBody(Body):
    size: int = Field(ge=0, le=1000, description="Loaded VMMs kept ready for this snapshot.")


class ExecBody(Body):
    args: Annotated[list[str], FailFast()] = Field(
        min_length=1, description="The program and its arguments; no shell."
    )
    timeout_secs: float = Field(30, gt=0, le=MAX_EXEC_SECS)
    env: dict[str, str] | None = Field(None, description="Added to the sandbox's own environment.")
    cwd: _PathText | None = None

    def parsed(self) -> ExecRequest:
        total = 0
        for index, arg in enumerate(self.args):
            total += _argument_bytes(f"args.{index}", arg)
        for name, value in (self.env or {}).items():
            if not name or "=" in name:
                raise BadField("env", f"{name[:64]!a} is not a variable's name")
            total += _argument_bytes("env", f"{name}={value}")
        if total > MAX_ARGS_BYTES:
            raise BadField("args", f"with env, is over {MAX_ARGS_BYTES} bytes", hint="send a file instead")
        return ExecRequest(self.args, self.timeout_secs, self.env, self.cwd)


class EvalBody(Body):
    code: str = Field(description="A Python expression, run in the warmed interpreter.")
    timeout_secs: float = Field(30, gt=0, le=MAX_EXEC_SECS)


BODIES: tuple[type[Body], ...] = (SpawnBody, CreateSnapshotBody, StandbyBody, ExecBody, EvalBody)

AnyBody = TypeVar("AnyBody", bound=Body)


def validated(model: type[AnyBody], value: Any) -> AnyBody:
    """The body, or BadField naming the first field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        raise BadField(_field_name(first["loc"]), _problem(first["type"], first["msg"])) from None


def _argument_bytes(field: str, text: str) -> int:
    size = len(text.encode()) + 1
    if size > MAX_ARG_BYTES:
        raise BadField(field, f"is over {MAX_ARG_BYTES} bytes", hint="send a file instead")
    return size


def _field_name(loc: tuple[int | str, ...]) -> str:
    name = ".".join(str(part) for part in loc) or "body"
    return name if len(name) <= 80 else name[:77] + "..."


def _problem(kind: str, message: str) -> str:
    match kind:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a known field"
        case "model_type":
            return "must be a JSON object"
        case _:
            return message[0].lower() + message[1:]
