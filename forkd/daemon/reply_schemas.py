"""What replies look like, for the OpenAPI document alone.

Handlers build replies from `forkd.models`; nothing here runs while a request
is served. The tests hold every reply against these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def _no_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def _absent(description: str | None = None) -> Any:
    """A key that is left out, never null, when there is nothing to say."""
    return Field(default=None, description=description, json_schema_extra=_no_default)


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(Reply):
    error: str = Field(description="What happened, for people.")
    code: str = Field(description="What happened, for programs; never changes.")
    hint: str = _absent("What to do next.")


class Health(Reply):
    ok: Literal[True]


class Version(Reply):
    version: str
    api: Literal["v1"]


class SnapshotInfo(Reply):
    tag: str
    dir: str
    created_at_unix: int = Field(ge=0)
    status: Literal["writing", "ready", "failed"]
    bootable: bool
    engine: Literal["microvm", "process"]
    isolation: Literal["vm", "process"]
    accel: Literal["auto", "kvm", "tcg"]
    vcpus: int = Field(ge=1)
    memory_mib: int = Field(ge=1)
    branched_from: str = _absent("The sandbox it was captured from.")
    warning: str = _absent()


class SnapshotDetail(BaseModel):
    model_config = ConfigDict(extra="allow")

    tag: str
    dir: str
    created_at_unix: int = _absent()
    memory_logical_bytes: int = Field(ge=0)
    memory_physical_bytes: int = Field(ge=0)
    vmstate_bytes: int = Field(ge=0)
    parent_tag: str = _absent("Absent for a base.")
    parent_content_hash: str = _absent("SHA-256 in lowercase hex; absent for a base.")
    chain_depth: int = Field(ge=0)
    dependents: list[str]
    ancestors: list[str]


class SandboxInfo(Reply):
    id: str
    snapshot_tag: str
    netns: str | None
    guest_addr: str
    created_at_unix: int = Field(ge=0)
    pid: int | None
    memory_limit_mib: int | None
    has_branched: bool
    last_branch_memory_path: str | None
    branch_count: int = Field(ge=0)
    engine: Literal["microvm", "process"]
    isolation: Literal["vm", "process"]
    accel: Literal["auto", "kvm", "tcg"]
    state: Literal["starting", "running", "dead"]
    reason: str | None = Field(description="Why a dead one died.")
    ttl_secs: int | None


class ExecReply(Reply):
    stdout: str
    stderr: str
    exit_code: int = Field(description="Negative: killed by that signal.")
    truncated: bool
    timed_out: bool


class EvalReply(Reply):
    result: str | None
    error: str | None
    exit_code: int


class Written(Reply):
    path: str
    bytes: int = Field(ge=0)


class ImageInfo(Reply):
    name: str
    key: str
    vcpus: int = Field(ge=1)
    memory_mib: int = Field(ge=1)
    disk_bytes: int = Field(ge=0)
    created_at_unix: int = Field(ge=0)


class HostCheck(Reply):
    name: str
    level: Literal["pass", "warn", "fail"]
    detail: str
    hint: str | None = None


class HostReport(BaseModel):
    model_config = ConfigDict(extra="allow")

    checks: list[HostCheck]
    verdict: str
