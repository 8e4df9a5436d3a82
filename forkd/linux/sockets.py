"""Unix sockets in folders of any depth.

A socket address holds 108 bytes and a sandbox's folder may be deeper; going
through /proc/self/fd keeps the address short whatever the folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short(path: Path) -> Iterator[str]:
    """`path` as an address that fits, valid inside the block."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path, backlog: int = 4) -> socket.socket:
    """A listening socket, mode 0600 because its folder is 0700."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short(path) as address:
            sock.bind(address)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        with short(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
