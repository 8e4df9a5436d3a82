"""A writer for the "newc" cpio format, which the Linux kernel unpacks as its initramfs.

Equal entries give equal bytes: no clock, no host uid, no inode numbers leak in.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

_FIELDS = "070701" + "%08X" * 13


@dataclass(frozen=True, slots=True)
class Entry:
    """`mode` includes the file type. `device` is (major, minor) of a device node."""

    path: str  # without a leading slash
    mode: int
    data: bytes = b""  # of a regular file, or the target of a symlink
    device: tuple[int, int] = (0, 0)


def folder(path: str) -> Entry:
    return Entry(path, stat.S_IFDIR | 0o755)


def regular(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data)


def symlink(path: str, target: str) -> Entry:
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def character(path: str, major: int, minor: int) -> Entry:
    return Entry(path, stat.S_IFCHR | 0o600, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """The whole archive. Folders must come before what is in them: the kernel makes no parents."""
    packed = bytearray()
    for inode, entry in enumerate(entries, start=1):
        _append(packed, inode, entry)
    _append(packed, 0, Entry("TRAILER!!!", 0))
    return bytes(packed)


def _append(packed: bytearray, inode: int, entry: Entry) -> None:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    major, minor = entry.device
    header = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, major, minor, len(name), 0)
    packed += (_FIELDS % header).encode("ascii") + name
    _pad(packed)
    packed += entry.data
    _pad(packed)


def _pad(packed: bytearray) -> None:
    packed += b"\0" * (-len(packed) % 4)
