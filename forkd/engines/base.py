"""The seam: what an engine must do, and the few values that pass through it.

Engines are plain blocking code; the runtime calls them on worker threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forkd.models import Accel, EngineName, Image, Machine, Snapshot


@dataclass(frozen=True, slots=True)
class Slot:
    """The place one sandbox runs in: an id, a folder of its own (0700), its limits."""

    id: str
    dir: Path
    memory_limit_mib: int | None = None

    @property
    def agent_socket(self) -> Path:
        return self.dir / "agent.sock"

    @property
    def log(self) -> Path:
        return self.dir / "vmm.log"


@dataclass(frozen=True, slots=True)
class Handle:
    """A live sandbox, as much of it as outlives the daemon that started it."""

    slot: Slot
    pid: int


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture wrote into the staging folder, and by which program."""

    files: tuple[str, ...]
    vmm: str


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `forkd doctor`."""

    name: str
    level: str  # pass | warn | fail
    detail: str
    hint: str = ""


class Engine(Protocol):
    name: EngineName

    def probe(self, image: Image | None) -> list[Check]:
        """What this host can do, and why not. `image` lends its kernel to the proof that KVM works."""

    def choose_accel(self, wanted: Accel, image: Image) -> Accel:
        """Settle `auto`, or raise Unsupported with the reason; emulation only if asked for or allowed."""

    def warm(self, image: Image, machine: Machine, accel: Accel, staging: Path, slot: Slot) -> Handle:
        """Boot a parent whose memory and disk live in `staging`. The runtime then talks to its agent."""

    def capture(self, handle: Handle, staging: Path) -> Captured:
        """Write the parent's state beside its memory and end it."""

    def prepare(self, snapshot: Snapshot, slot: Slot) -> Handle:
        """A child with everything loaded, not yet running."""

    def resume(self, handle: Handle) -> None:
        """Let it run."""

    def stop(self, handle: Handle) -> None:
        """End it and wait until it is gone. Stopping twice is harmless."""

    def adopt(self, slot: Slot, pid: int | None) -> Handle | None:
        """The living sandbox of an earlier daemon, if it is still that one."""

    def sweep(self, slot: Slot) -> None:
        """End whatever of this slot is left, known only by its id."""

    def died_of(self, slot: Slot) -> str:
        """Why a sandbox that is gone went."""
