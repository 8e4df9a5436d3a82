"""Loaded VMMs kept ready per snapshot, so that a spawn only has to let them run.

Journaled like sandboxes before they are made; a daemon that restarts removes
the old ones and makes new ones. Off (size 0) unless asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from forkd.live import Live
from forkd.models import Snapshot, SpawnRequest
from forkd.names import SandboxId

if TYPE_CHECKING:
    from forkd.runtime import Runtime


class Standby:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sizes: dict[str, int] = {}
        self._ready: dict[str, list[Live]] = {}
        self._filling: dict[str, asyncio.Task[None]] = {}

    def size(self) -> int:
        return sum(map(len, self._ready.values()))

    def want(self, snapshot: Snapshot, size: int | None = None) -> None:
        """Set how many to keep (None: as before) and fill up behind the caller's back."""
        if size is not None:
            self._sizes[snapshot.tag] = size
        task = self._filling.get(snapshot.tag)
        if task is None or task.done():
            self._filling[snapshot.tag] = asyncio.get_running_loop().create_task(self._fill(snapshot))

    async def settled(self, tag: str) -> None:
        if task := self._filling.get(tag):
            await asyncio.shield(task)

    def take(self, snapshot: Snapshot, request: SpawnRequest) -> list[Live]:
        """As many as fit the request; a child with a memory limit is always made to measure."""
        if request.memory_limit_mib is not None:
            return []
        ready = self._ready.get(snapshot.tag, [])
        taken, self._ready[snapshot.tag] = ready[: request.n], ready[request.n :]
        for live in taken:
            live.ttl_secs = request.ttl_secs
            live.touched = time.monotonic()
            live.created_at_unix = int(time.time())
        return taken

    async def _fill(self, snapshot: Snapshot) -> None:
        runtime, tag = self._runtime, snapshot.tag
        while len(self._ready.setdefault(tag, [])) > self._sizes.get(tag, 0):
            await runtime._destroy(self._ready[tag].pop())
        while len(self._ready[tag]) < self._sizes.get(tag, 0):
            slot = runtime._slot(SandboxId.new().value)
            live = Live(slot, tag, snapshot.engine, snapshot.accel, int(time.time()))
            await runtime.write(
                lambda one=live: runtime.journal.put([runtime._record(one, purpose="standby")])
            )
            try:
                live.handle = await runtime.work(lambda one=live: runtime.prepare(snapshot, one.slot))
            except BaseException:
                await asyncio.shield(runtime._discard(slot))
                raise
            self._ready[tag].append(live)

    async def drop(self, tag: str) -> None:
        self._sizes.pop(tag, None)
        if task := self._filling.pop(tag, None):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        for live in self._ready.pop(tag, []):
            await self._runtime._destroy(live)

    async def close(self) -> None:
        for tag in [*self._filling]:
            await self.drop(tag)
