"""Where the daemon listens, and which Host and Origin headers it believes.

A web page can make a browser post to loopback, and a name under its control
can be made to resolve there. Neither knows our names: what is asked under
another name, or from another origin, is refused before the token is looked at.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from forkd.daemon.replies import error_reply
from forkd.errors import BadField, BadHost

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


@dataclass(frozen=True, slots=True)
class Bind:
    """A TCP address to listen on, resolved."""

    name: str
    family: socket.AddressFamily
    address: tuple[Any, ...]

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.address[0].partition("%")[0])


def parse_bind(text: str) -> Bind:
    name, colon, port = text.rpartition(":")
    name = name.removeprefix("[").removesuffix("]")
    if not colon or not name or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadField("bind", f"{text!r} is not ADDRESS:PORT", hint="for example 127.0.0.1:8889")
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as e:
        raise BadField("bind", f"{name!r} is not an address of this host: {e}") from e
    family, _, _, _, address = found[0]
    return Bind(name, family, address)


def host_of(authority: str) -> str:
    """The name or address in a Host header, without port, brackets and closing dot."""
    if authority.startswith("["):
        name, bracket, rest = authority[1:].partition("]")
        ok = bool(bracket) and (not rest or rest.startswith(":"))
        return name.lower() if ok else ""
    return authority.partition(":")[0].lower().removesuffix(".")


class HostLayer:
    def __init__(self, app: ASGIApp, bind: Bind | None, allowed: Iterable[str]) -> None:
        self._app = app
        self._names = _LOOPBACK_NAMES | {host_of(name) for name in allowed}
        # An address cannot be rebound, so a daemon on all interfaces takes any.
        self._any_address = bind is not None and bind.ip.is_unspecified
        if bind is not None:
            self._names |= {bind.name.lower(), str(bind.ip)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["state"].get("unix"):  # no browser reaches the socket
            try:
                self._check(scope["headers"])
            except BadHost as e:
                await error_reply(e)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        host, origins = "", []
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
        if not self._known(host_of(host)):
            raise BadHost(
                f"this daemon does not answer under the name {host[:80]!a}",
                hint="use its address, or add the name to allowed_hosts",
            )
        if any(origin not in (f"http://{host}", f"https://{host}") for origin in origins):
            raise BadHost("requests from web pages of other sites are refused", hint="call from a program")

    def _known(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._any_address
