"""Memory limits on a VMM, by cgroup v2 or, where only that exists, v1.

A leaf is made only for a sandbox that asked for a limit. All leaves of one data
folder sit below one parent named after it, so that a sweep knows its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import Unsupported

_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Where this data folder's leaves live, and in which dialect."""

    parent: Path
    unified: bool

    @classmethod
    def for_data_dir(cls, data_dir: Path) -> MemoryGroups:
        name = "forkd-" + hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
        unified = (_V2 / "cgroup.controllers").exists()
        return cls((_V2 if unified else _V1) / name, unified)

    def create(self, name: str, limit_mib: int) -> Path:
        """Make the leaf with its limit set, or raise Unsupported: a limit is never silently dropped."""
        limit = str(limit_mib * 1024 * 1024)
        leaf = self.parent / name
        try:
            if self.unified:
                (_V2 / "cgroup.subtree_control").write_text("+memory")
                self.parent.mkdir(exist_ok=True)
                (self.parent / "cgroup.subtree_control").write_text("+memory")
                leaf.mkdir()
                (leaf / "memory.max").write_text(limit)
                (leaf / "memory.swap.max").write_text("0")
            else:
                self.parent.mkdir(exist_ok=True)
                leaf.mkdir()
                (leaf / "memory.limit_in_bytes").write_text(limit)
        except OSError as e:
            with contextlib.suppress(OSError):
                leaf.rmdir()
            raise Unsupported(
                f"cannot limit memory on this host: {e}",
                hint="leave memory_limit_mib out, or run the daemon where it may create memory cgroups",
            ) from e
        return leaf

    def oom_killed(self, leaf: Path) -> bool:
        events = leaf / ("memory.events" if self.unified else "memory.oom_control")
        try:
            counts = dict(line.split() for line in events.read_text().splitlines())
        except (OSError, ValueError):
            return False
        return int(counts.get("oom_kill", 0)) > 0

    def remove(self, leaf: Path) -> None:
        """The kernel empties a group a moment after its last process is gone."""
        deadline = time.monotonic() + 2
        while True:
            try:
                leaf.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            else:
                return

    def leaves(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [p for p in self.parent.iterdir() if p.is_dir()]
        return []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.parent.rmdir()


def add(leaf: Path, pid: int) -> None:
    (leaf / "cgroup.procs").write_text(str(pid))
