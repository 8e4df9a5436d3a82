"""Values that cross a wire or a disk: frozen, typed, and free of behaviour.

`as_dict` of the Info classes is the REST shape: the reference system's keys
first (explicit nulls where it has them, absent keys where it omits them),
then ours, which are additive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class EngineName(StrEnum):
    MICROVM = "microvm"
    PROCESS = "process"


class Isolation(StrEnum):
    """What stands between a sandbox and the host's kernel."""

    VM = "vm"
    PROCESS = "process"


class Accel(StrEnum):
    """How a microVM's instructions run. TCG is emulation: 10 to 20 times slower, and never chosen silently."""

    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


class SnapshotStatus(StrEnum):
    WRITING = "writing"
    READY = "ready"
    FAILED = "failed"


class SandboxState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Machine:
    """The virtual hardware of a parent, and so of every child restored from it."""

    vcpus: int = 1
    memory_mib: int = 256


@dataclass(frozen=True, slots=True)
class Image:
    """What a parent boots from. Files are immutable once the image is in the cache."""

    name: str
    key: str  # content hash of the recipe and of what was put in
    kernel: Path
    initrd: Path
    rootfs: Path
    machine: Machine
    warmup: str = ""  # Python source run in the warmed interpreter before capture
    env: dict[str, str] = field(default_factory=dict)
    created_at_unix: int = 0

    @property
    def disk_bytes(self) -> int:
        return self.rootfs.stat().st_size


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A captured parent on disk: whole or absent."""

    tag: str
    dir: Path
    engine: EngineName
    accel: Accel
    machine: Machine
    image_key: str
    rootfs: Path
    created_at_unix: int
    vmm: str  # what wrote the state, e.g. "QEMU 7.2.22"
    sizes: dict[str, int]  # file name -> bytes, checked before every start
    digests: dict[str, str]  # file name -> sha256
    status: SnapshotStatus = SnapshotStatus.READY
    branched_from: str | None = None
    warning: str | None = None

    @property
    def memory(self) -> Path:
        return self.dir / "memory.bin"

    @property
    def vmstate(self) -> Path:
        return self.dir / "vmstate"

    @property
    def disk(self) -> Path:
        return self.dir / "disk.qcow2"

    @property
    def isolation(self) -> Isolation:
        return Isolation.VM if self.engine is EngineName.MICROVM else Isolation.PROCESS

    def as_dict(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "tag": self.tag,
            "dir": str(self.dir),
            "created_at_unix": self.created_at_unix,
            "status": self.status.value,
            "bootable": self.status is SnapshotStatus.READY,
            "engine": self.engine.value,
            "isolation": self.isolation.value,
            "accel": self.accel.value,
            "vcpus": self.machine.vcpus,
            "memory_mib": self.machine.memory_mib,
        }
        if self.branched_from is not None:
            info["branched_from"] = self.branched_from
        if self.warning is not None:
            info["warning"] = self.warning
        return info


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    id: str
    snapshot_tag: str
    guest_addr: str
    created_at_unix: int
    pid: int | None
    memory_limit_mib: int | None
    engine: EngineName
    accel: Accel
    state: SandboxState
    reason: str | None = None  # why a dead one died
    ttl_secs: int | None = None
    spawn_ms: float | None = None  # from its turn to start until it confirmed that it is awake
    netns: str | None = None
    has_branched: bool = False
    last_branch_memory_path: str | None = None
    branch_count: int = 0

    @property
    def isolation(self) -> Isolation:
        return Isolation.VM if self.engine is EngineName.MICROVM else Isolation.PROCESS

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "snapshot_tag": self.snapshot_tag,
            "netns": self.netns,
            "guest_addr": self.guest_addr,
            "created_at_unix": self.created_at_unix,
            "pid": self.pid,
            "memory_limit_mib": self.memory_limit_mib,
            "has_branched": self.has_branched,
            "last_branch_memory_path": self.last_branch_memory_path,
            "branch_count": self.branch_count,
            "engine": self.engine.value,
            "isolation": self.isolation.value,
            "accel": self.accel.value,
            "state": self.state.value,
            "reason": self.reason,
            "ttl_secs": self.ttl_secs,
            "spawn_ms": self.spawn_ms,
        }


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    snapshot_tag: str
    n: int = 1
    memory_limit_mib: int | None = None
    ttl_secs: int | None = None


@dataclass(frozen=True, slots=True)
class CreateSnapshot:
    """Either `image` by name, or `kernel` and `rootfs` by path on the daemon's host."""

    tag: str
    image: str | None = None
    kernel: Path | None = None
    rootfs: Path | None = None
    accel: Accel = Accel.AUTO
    vcpus: int | None = None
    memory_mib: int | None = None
    boot_wait_secs: int = 60


@dataclass(frozen=True, slots=True)
class SpawnTiming:
    """What one spawn cost, measured inside the daemon. Reported as response headers, not in the body."""

    running_ms: float
    ready_ms: float
    per_child_ms: list[float]


@dataclass(frozen=True, slots=True)
class ExecRequest:
    args: list[str]
    timeout_secs: float = 30
    env: dict[str, str] | None = None
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class ExecResult:
    stdout: str
    stderr: str
    exit_code: int
    truncated: bool = False
    timed_out: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "stdout": self.stdout,
            "stderr": self.stderr,
            "exit_code": self.exit_code,
            "truncated": self.truncated,
            "timed_out": self.timed_out,
        }


@dataclass(frozen=True, slots=True)
class EvalResult:
    result: str | None
    error: str | None
    exit_code: int
    traceback: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"result": self.result, "error": self.error, "exit_code": self.exit_code}
