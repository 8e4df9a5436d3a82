"""Snapshots on disk: whole or absent.

A snapshot is staged in a hidden folder beside the others, synced, and renamed
into place; only a folder with a readable manifest is one. Leases keep a delete
from pulling files away from under a child. Nothing here starts anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import Corrupt, InUse, NoSnapshot, NoSpace, TagTaken
from forkd.models import Accel, EngineName, Machine, Snapshot
from forkd.names import Tag

MANIFEST = "snapshot.json"
FORMAT = 1
_STAGING = ".staging-"
_SPARE_BYTES = 256 << 20  # left free on the disk by every capture


@dataclass(frozen=True, slots=True)
class Staging:
    tag: Tag
    path: Path


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()  # guards the two tables below
        self._leases: Counter[str] = Counter()
        self._claimed: set[str] = set()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def sweep(self) -> None:
        """Remove what a killed daemon was still writing. Only before anything is staged."""
        for folder in self.root.glob(f"{_STAGING}*"):
            shutil.rmtree(folder)

    def tags(self) -> list[Tag]:
        return sorted(
            Tag(p.name) for p in self.root.iterdir() if (p / MANIFEST).is_file() and not p.is_symlink()
        )

    def list(self) -> list[Snapshot]:
        found = []
        for tag in self.tags():
            with contextlib.suppress(Corrupt, NoSnapshot):
                found.append(self.get(tag))
        return found

    def get(self, tag: Tag) -> Snapshot:
        folder = self.root / tag.value
        if folder.is_symlink() or not folder.is_dir():
            raise NoSnapshot(tag)
        try:
            data = json.loads((folder / MANIFEST).read_text())
            if data["format"] > FORMAT:
                raise Corrupt(
                    f"snapshot {tag}: {MANIFEST} has format {data['format']}, newer than this forkd"
                )
            return _parse(tag, folder, data)
        except FileNotFoundError:
            raise NoSnapshot(tag) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise Corrupt(f"snapshot {tag}: {MANIFEST} is damaged ({type(e).__name__})") from e

    @contextlib.contextmanager
    def open(self, tag: Tag) -> Iterator[Snapshot]:
        """The snapshot, checked, and leased for as long as the block runs."""
        with self._lock:
            snapshot = self.get(tag)
            self._leases[tag.value] += 1
        try:
            self._check(snapshot)
            yield snapshot
        finally:
            with self._lock:
                self._leases[tag.value] -= 1

    def _check(self, snapshot: Snapshot) -> None:
        """Sizes only: hashing hundreds of megabytes has no place on the spawn path."""
        for name, size in snapshot.sizes.items():
            path = snapshot.dir / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
                raise Corrupt(f"snapshot {snapshot.tag}: {name} is missing, or not the {size} bytes it was")
        if not snapshot.rootfs.is_file():
            raise Corrupt(
                f"snapshot {snapshot.tag}: its image's {snapshot.rootfs.name} is gone",
                hint="build the image again",
            )

    @contextlib.contextmanager
    def stage(self, tag: Tag, need_bytes: int) -> Iterator[Staging]:
        """Claim the name and the space. Leaving the block without a commit leaves nothing."""
        with self._lock:
            folded = {t.value.casefold() for t in self.tags()} | {t.casefold() for t in self._claimed}
            if tag.value.casefold() in folded:
                raise TagTaken(
                    f"snapshot {tag} already exists", hint=f"delete it first: forkd snapshot rm {tag}"
                )
            if shutil.disk_usage(self.root).free < need_bytes + _SPARE_BYTES:
                raise NoSpace(f"{self.root} has less than {(need_bytes + _SPARE_BYTES) >> 20} MiB free")
            self._claimed.add(tag.value)
        path = self.root / f"{_STAGING}{secrets.token_hex(8)}"
        try:
            path.mkdir(mode=0o700)
            yield Staging(tag, path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            with self._lock:
                self._claimed.discard(tag.value)

    def commit(self, staging: Staging, manifest: dict[str, Any], files: tuple[str, ...]) -> Snapshot:
        """Seal and publish. `files` are what a child depends on; they never change again."""
        sizes, digests = {}, {}
        for name in files:
            path = staging.path / name
            with path.open("rb") as f:
                digests[name] = hashlib.file_digest(f, "sha256").hexdigest()
                sizes[name] = os.fstat(f.fileno()).st_size
                os.fchmod(f.fileno(), 0o400)
                os.fsync(f.fileno())
        home = self.root / staging.tag.value
        body = {
            "format": FORMAT,
            "tag": staging.tag.value,
            "created_at_unix": int(time.time()),
            **manifest,
            "sizes": sizes,
            "digests": digests,
            "vmstate": str(home / "vmstate"),
            "memory": str(home / "memory.bin"),
            "volumes": [],
        }
        with (staging.path / MANIFEST).open("x") as f:
            json.dump(body, f, indent=2)
            f.flush()
            os.fsync(f.fileno())
        _sync_folder(staging.path)
        staging.path.rename(home)
        _sync_folder(self.root)
        return self.get(staging.tag)

    def remove(self, tag: Tag) -> None:
        """The name goes first, in one step; the bytes follow."""
        with self._lock:
            if self._leases[tag.value]:
                raise InUse(f"snapshot {tag} is being started from", hint="try again when that is done")
            folder = self.root / tag.value
            if not folder.is_dir() or folder.is_symlink():
                raise NoSnapshot(tag)
            grave = self.root / f"{_STAGING}{secrets.token_hex(8)}"
            folder.rename(grave)
        _sync_folder(self.root)
        shutil.rmtree(grave)


def _parse(tag: Tag, folder: Path, data: dict[str, Any]) -> Snapshot:
    return Snapshot(
        tag=tag.value,
        dir=folder,
        engine=EngineName(data["engine"]),
        accel=Accel(data["accel"]),
        machine=Machine(**data["machine"]),
        image_key=str(data["image_key"]),
        rootfs=Path(data["rootfs"]),
        created_at_unix=int(data["created_at_unix"]),
        vmm=str(data["vmm"]),
        sizes={str(k): int(v) for k, v in data["sizes"].items()},
        digests={str(k): str(v) for k, v in data["digests"].items()},
    )


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
