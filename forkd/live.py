"""One live sandbox as the daemon holds it: its link, its listener, its process, its clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forkd.agent_link import AgentLink
from forkd.engines.base import Handle, Slot
from forkd.errors import SandboxDead
from forkd.guest_addr import GuestAddr
from forkd.models import Accel, EngineName, SandboxInfo, SandboxState


@dataclass(slots=True)
class Live:
    slot: Slot
    tag: str
    engine: EngineName
    accel: Accel
    created_at_unix: int
    ttl_secs: int | None = None
    handle: Handle | None = None
    link: AgentLink | None = None
    address: GuestAddr | None = None
    state: SandboxState = SandboxState.STARTING
    reason: str | None = None
    spawn_ms: float | None = None
    touched: float = field(default_factory=time.monotonic)
    _pidfd: int | None = None

    @property
    def id(self) -> str:
        return self.slot.id

    @property
    def expired(self) -> bool:
        """By the monotonic clock: a step of the wall clock expires nobody."""
        return self.ttl_secs is not None and time.monotonic() > self.touched + self.ttl_secs

    def agent(self) -> AgentLink:
        if self.link is None or self.state is not SandboxState.RUNNING:
            raise SandboxDead(f"sandbox {self.id} is {self.state.value}: {self.reason or 'not running yet'}")
        return self.link

    async def attach(self, handle: Handle, port: int | None = None) -> AgentLink:
        """Connect to its agent and give it its loopback address."""
        self.handle = handle
        self.link = await AgentLink.connect(self.slot.agent_socket)
        self.address = await GuestAddr.open(self.agent, port)
        return self.link

    def watch(self, died: Callable[[Live], None]) -> None:
        """Call `died` the moment the process is gone; may be at once."""
        assert self.handle is not None
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(self.handle.pid)
        except ProcessLookupError:
            loop.call_soon(died, self)
            return
        loop.add_reader(self._pidfd, died, self)

    async def detach(self) -> None:
        """Let go of everything on this side; the process itself is the engine's to stop."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self.address is not None:
            self.address.close()
        if self.link is not None:
            with contextlib.suppress(OSError):
                await self.link.close()
            self.link = None

    def info(self) -> SandboxInfo:
        return SandboxInfo(
            id=self.id,
            snapshot_tag=self.tag,
            guest_addr=f"127.0.0.1:{self.address.port}" if self.address and self.link else "",
            created_at_unix=self.created_at_unix,
            pid=self.handle.pid if self.handle and self.state is SandboxState.RUNNING else None,
            memory_limit_mib=self.slot.memory_limit_mib,
            engine=self.engine,
            accel=self.accel,
            state=self.state,
            reason=self.reason,
            ttl_secs=self.ttl_secs,
            spawn_ms=self.spawn_ms,
        )
