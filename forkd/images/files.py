"""Files on the host: digests, copies that keep holes, paths that stay beneath a root, durable folders.

Knows nothing of images.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from forkd.errors import BadField

_MAX_LINKS = 40  # the kernel's own bound on symlinks in one path
_COPY_BYTES = 1 << 30


def digest_values(values: Any) -> str:
    """The sha256 of JSON-able values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def digest_tree(root: Path) -> str:
    """Names, kinds, owners, modes and bytes of everything below `root`; not times."""
    found: list[Any] = []
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(folders + names):
            path = Path(folder, name)
            info = path.lstat()
            content = ""
            if stat.S_ISREG(info.st_mode):
                content = digest_file(path)
            elif stat.S_ISLNK(info.st_mode):
                content = str(path.readlink())
            where = str(path.relative_to(root))
            found.append([where, info.st_mode, info.st_uid, info.st_gid, info.st_rdev, content])
    return digest_values(found)


def copy_sparse(source: Path, target: Path) -> None:
    """Copy the data and keep the holes; filesystems that can share blocks do so.

    `source` is opened here and not by a program, so that a caller may hand over
    an open file as /proc/self/fd/N.
    """
    with source.open("rb") as src, target.open("xb") as dst:
        size = os.fstat(src.fileno()).st_size
        at = 0
        while at < size:
            try:
                start = os.lseek(src.fileno(), at, os.SEEK_DATA)
            except OSError as e:
                if e.errno != errno.ENXIO:
                    raise
                break  # a hole up to the end
            at = os.lseek(src.fileno(), start, os.SEEK_HOLE)
            _copy_range(src.fileno(), dst.fileno(), start, at)
        dst.truncate(size)


def _copy_range(src: int, dst: int, start: int, end: int) -> None:
    try:
        while start < end:
            done = os.copy_file_range(src, dst, min(end - start, _COPY_BYTES), start, start)
            if done == 0:
                return  # the file shrank meanwhile
            start += done
    except OSError as e:
        # Some filesystems, and pairs of them, cannot copy inside the kernel.
        if e.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        while start < end and (data := os.pread(src, min(end - start, 1 << 20), start)):
            start += os.pwrite(dst, data, start)


def beneath(root: Path, guest: str) -> Path:
    """Where `guest` leads for a process whose root folder is `root`.

    A root filesystem may hold any symlink (`/etc -> /`, `lib -> ../../..`), and
    plain path joining would follow it out to the host.
    """
    todo = [part for part in reversed(PurePosixPath(guest).parts) if part != "/"]
    at = root
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            at = at if at == root else at.parent
            continue
        if not (at / part).is_symlink():
            at = at / part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise BadField("source.rootfs", f"{guest} in it is a loop of symlinks")
        target = (at / part).readlink()
        at = root if target.is_absolute() else at
        todo += [part for part in reversed(target.parts) if part != "/"]
    return at


def make_durable(folder: Path) -> None:
    """Seal a folder before it is renamed into place: read-only files, everything on disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.chmod(0o755 if path.is_dir() else 0o444)
        sync(path)
    folder.chmod(0o755)
    sync(folder)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
