"""The images folder on disk: entries that are whole or absent, locks, staging, sweeping.

    <images>/<name>/<key>/           one built image; `current` beside it names the latest
    <images>/.cache/kernel/<key>/    a kernel and its modules, shared by images through hard links
    <images>/.cache/rootfs/<key>/    a root filesystem, likewise
    <images>/.cache/staging/<id>/    work in progress; its builder holds a flock on the folder
    <images>/.cache/locks/           one file per thing that only one build may make at a time

Lock order: users (shared), then image, then kernel, then rootfs.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from forkd.images.files import make_durable, sync
from forkd.images.tools import Progress


class Cache:
    def __init__(self, images_dir: Path) -> None:
        self.images = images_dir.absolute()
        self._hidden = self.images / ".cache"
        self._staging = self._hidden / "staging"
        self._locks = self._hidden / "locks"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold while using cached entries: what is pruned is then never what a build is about to link."""
        self._staging.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(exist_ok=True)
        with _flocked(self._locks / "users", fcntl.LOCK_SH):
            self._sweep()
            yield

    def entry(self, kind: str, key: str) -> Path:
        return self._hidden / kind / key

    def entries(self, kind: str) -> list[Path]:
        folder = self._hidden / kind
        return sorted(folder.iterdir()) if folder.is_dir() else []

    @contextmanager
    def lock(self, kind: str, name: str, progress: Progress) -> Iterator[None]:
        """One maker at a time; a second one waits here and then finds the first one's work."""
        path = self._locks / f"{kind}-{name}"
        with ExitStack() as stack:
            try:
                stack.enter_context(_flocked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except _Held:
                progress.line(f"waiting for another build of the same {kind}")
                stack.enter_context(_flocked(path, fcntl.LOCK_EX))
            yield

    @contextmanager
    def try_lock(self, kind: str, name: str) -> Iterator[bool]:
        """As `lock`, but yields False instead of waiting."""
        with ExitStack() as stack:
            try:
                stack.enter_context(_flocked(self._locks / f"{kind}-{name}", fcntl.LOCK_EX | fcntl.LOCK_NB))
            except _Held:
                yield False
            else:
                yield True

    @contextmanager
    def stage(self) -> Iterator[Path]:
        """A private folder on the same filesystem, gone when the block is left, however it is left."""
        path, fd = self._new_stage()
        try:
            yield path
        finally:
            # Removed before it is unlocked: a sweep never meets half of it.
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)

    def commit(self, staged: Path, target: Path) -> None:
        """Move a finished folder into place. An older one steps aside into the staging folder.

        Images keep their files through hard links, so a replaced cache entry takes nothing from them.
        """
        make_durable(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(staged.with_name(f"{staged.name}.replaced"))
        staged.rename(target)
        sync(target.parent)
        sync(target.parent.parent)

    def prune(self) -> None:
        """Drop cached kernels and root filesystems that no image links. Skipped while a build runs."""
        try:
            with _flocked(self._locks / "users", fcntl.LOCK_EX | fcntl.LOCK_NB):
                for entry in self.entries("kernel") + self.entries("rootfs"):
                    if not any(f.stat().st_nlink > 1 for f in entry.iterdir() if f.is_file()):
                        shutil.rmtree(entry)
        except _Held:
            pass

    def _new_stage(self) -> tuple[Path, int]:
        while True:
            path = self._staging / secrets.token_hex(8)
            path.mkdir(mode=0o700)
            try:
                fd = _open_folder(path)
            except FileNotFoundError:
                continue  # swept between the two calls
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink > 0:
                return path, fd
            os.close(fd)  # swept before the lock was ours

    def _sweep(self) -> None:
        """Remove what killed builds left. A staging folder that can be locked has no builder."""
        for path in self._staging.iterdir():
            try:
                fd = _open_folder(path)
            except OSError:
                continue  # its builder has just removed it
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass
            finally:
                os.close(fd)


class _Held(Exception):
    """Another process holds the lock."""


@contextmanager
def _flocked(path: Path, how: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, how)
        except BlockingIOError as e:
            raise _Held from e
        yield
    finally:
        os.close(fd)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
