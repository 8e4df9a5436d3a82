"""Listening sockets, made safe before anyone can connect: bound here, set listening by the server."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkd.daemon.hosts import Bind
from forkd.errors import BadField, InUse

_MAX_NAME = 107  # sun_path, without its closing NUL


def bind_tcp(bind: Bind) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol number says TCP, and accepted sockets inherit it.
    # Without it a small reply can wait 40 ms for an acknowledgement.
    sock = socket.socket(bind.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(bind.address)
    except OSError as e:
        sock.close()
        where = f"{bind.name}:{bind.address[1]}"
        raise BadField("bind", f"cannot listen on {where}: {e.strerror}", hint="take another port") from e
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A socket that nobody but its owner could ever open."""
    with _reachable(path) as name:
        _make_way(path, name)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A chmod after bind would leave a moment in which anyone can connect.
        before = os.umask(0o177)
        try:
            sock.bind(name)
        except OSError as e:
            sock.close()
            raise BadField("data_dir", f"cannot make the socket {path}: {e.strerror}") from e
        finally:
            os.umask(before)
    return sock


def unlink_socket(path: Path) -> None:
    """Take away our own socket file; another kind of file in its place stays."""
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    except FileNotFoundError:
        pass


def _make_way(path: Path, name: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InUse(f"{path} is in the way and not a socket", hint="move it, or take another data folder")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            path.unlink()  # nobody listens: left by a daemon that was killed
            return
        except BlockingIOError:
            pass  # a full backlog has an owner
    raise InUse(f"another process listens on {path}", hint="stop it, or take another data folder")


@contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """A name for the socket that fits into sockaddr_un, however deep the folder."""
    if len(os.fsencode(path)) <= _MAX_NAME:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
