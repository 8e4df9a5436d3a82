"""Makes one child reachable at a fixed address: claims the address, then passes TCP connections on.

Clients of the reference system look for their sandbox at 10.42.0.2:8888, which no host has by itself.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import subprocess
import threading
from collections.abc import Iterator

from forkd.cli.session import Refused
from forkd.client.direct import split_target

LABEL = "lo:forkd"  # marks an address as ours, for `forkd cleanup`
_CONNECT_SECS = 5.0
_CONNECTIONS = 256


@contextlib.contextmanager
def claimed(target: str) -> Iterator[socket.socket | None]:
    """A socket listening at `target`; None where the host has no such address and we may not add it."""
    try:
        host, port = split_target(target)
    except ValueError as e:
        raise Refused(str(e), hint="check FORKD_TARGET") from e
    added = False
    try:
        listener = _listen(host, port)
        if listener is None and (added := add_address(host)):
            listener = _listen(host, port)
        with listener or contextlib.nullcontext():
            yield listener
    finally:
        if added:
            remove_address(host)


class Relay:
    """Passes every connection on the listener to `guest_addr`, until closed."""

    def __init__(self, listener: socket.socket, guest_addr: str) -> None:
        self._listener = listener
        self._guest = split_target(guest_addr)
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="forkd-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Closing alone would leave the thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            self._room.acquire()
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection(self._guest, _CONNECT_SECS) as guest:
                guest.settimeout(None)
                back = threading.Thread(target=_pump, args=(guest, client), daemon=True)
                back.start()
                _pump(client, guest)
                back.join()
        except OSError:
            pass  # the client sees the closed connection
        finally:
            self._room.release()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    # Each direction ends by itself: a client may close its side and still wait for the reply.
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _listen(host: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRNOTAVAIL:
            return None
        if e.errno == errno.EADDRINUSE:
            raise Refused(
                f"{host}:{port} is in use, most likely by another `forkd fork`",
                hint="end that one, or choose another address with FORKD_TARGET",
            ) from e
        raise Refused(f"cannot listen at {host}:{port}: {e.strerror or e}", hint="check FORKD_TARGET") from e
    return listener


def in_use(host: str, port: int) -> bool:
    try:
        listener = _listen(host, port)
    except Refused:
        return True
    if listener is not None:
        listener.close()
    return False


def add_address(host: str) -> bool:
    if os.geteuid() != 0 or not _is_address(host):
        return False
    return _ip("addr", "add", _prefix(host), "dev", "lo", *(() if ":" in host else ("label", LABEL)))


def remove_address(host: str) -> None:
    _ip("addr", "del", _prefix(host), "dev", "lo")


def left_addresses() -> list[str]:
    """Addresses that a killed `forkd fork` did not get to remove."""
    try:
        command = ["ip", "-o", "-4", "addr", "show", "dev", "lo", "label", LABEL]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return []
    # 1: lo    inet 10.42.0.2/32 scope global lo:forkd ...
    return [line.split()[3].partition("/")[0] for line in lines if len(line.split()) > 3]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _prefix(host: str) -> str:
    return f"{host}/{128 if ':' in host else 32}"


def _ip(*args: str) -> bool:
    try:
        return subprocess.run(["ip", *args], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
