"""The one owner of live state: spawn, talk to, kill, recover. Lives on the daemon's event loop.

Blocking work (engines, journal, store) goes to worker threads; as many starts
run at once as there are cores, because more only makes all of them late.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forkd import guest, images, parents
from forkd.config import Config
from forkd.engines.base import Engine, Slot
from forkd.errors import ForkdError, InUse, NoSandbox, NoSlot
from forkd.faults import point
from forkd.host import report
from forkd.journal import Journal, Record
from forkd.linux import process
from forkd.live import Live
from forkd.models import (
    Accel,
    CreateSnapshot,
    EvalResult,
    ExecRequest,
    ExecResult,
    Image,
    SandboxInfo,
    SandboxState,
    Snapshot,
    SpawnRequest,
    SpawnTiming,
)
from forkd.names import SandboxId, Tag
from forkd.standby import Standby
from forkd.store import Store

T = TypeVar("T")

_MIB_PER_CHILD = 24  # what one more VMM takes from the host before its guest writes anything
_DEAD_KEPT = 200  # dead sandboxes stay listed, with their reason, up to this many


class Runtime:
    def __init__(self, config: Config, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.store = Store(config.snapshots)
        self._live: dict[str, Live] = {}
        self._workers = ThreadPoolExecutor(max(4, config.workers * 2), "engine")
        self._writer = ThreadPoolExecutor(1, "journal")
        self._turns = asyncio.Semaphore(config.workers)
        self._standby = Standby(self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._boot = process.boot_id()

    # -- life of the daemon

    async def start(self) -> None:
        """Adopt or remove everything an earlier daemon left, before anyone can ask for anything."""
        self.config.run.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.journal = await self.write(lambda: Journal(self.config.journal_path))
        await self.work(self.store.sweep)
        records = await self.write(self.journal.all)
        await asyncio.gather(*(self._recover(record) for record in records))
        known = {record.id for record in records}
        for folder in self.config.run.iterdir():
            if folder.name not in known:  # cannot be ours to keep: a row is written before its folder
                await self._discard(self._slot(folder.name))
        self._background(self._expire())
        for snapshot in self.store.list():
            self._standby.want(snapshot, self.config.standby)

    async def close(self) -> None:
        """Sandboxes outlive the daemon; what is only half there does not."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._standby.close()
        for live in self._live.values():
            await live.detach()
        await self.write(self.journal.close)
        self._workers.shutdown()
        self._writer.shutdown()

    async def _recover(self, record: Record) -> None:
        slot = self._slot(record.id, record.memory_limit_mib)
        alive = None
        if record.purpose == "sandbox" and record.state == "running" and record.boot_id == self._boot:
            alive = await self.work(lambda: self.engine.adopt(slot, record.pid))
        if alive is not None:
            live = Live(
                slot,
                record.tag,
                self.engine.name,
                Accel(record.accel),
                record.created_at_unix,
                record.ttl_secs,
            )
            try:
                link = await live.attach(alive, record.guest_port)
                await link.hello(5)
            except ForkdError:
                await live.detach()
            else:
                self._register(live)
                return
        await self._discard(slot)

    def _register(self, live: Live) -> None:
        live.state = SandboxState.RUNNING
        self._live[live.id] = live
        live.watch(self._died)

    def _background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- sandboxes

    async def spawn(self, request: SpawnRequest) -> tuple[list[SandboxInfo], SpawnTiming]:
        """n children, all confirmed awake. On failure: none exist, nothing changed."""
        began = time.perf_counter()
        with self.store.open(Tag(request.snapshot_tag)) as snapshot:
            self._admit(request)
            children = self._standby.take(snapshot, request)
            children += [self._child(snapshot, request) for _ in range(request.n - len(children))]
            try:
                await self.write(lambda: self.journal.put([self._record(c) for c in children]))
                point("spawn.reserved")
                resumed = await _all(self._start(snapshot, child) for child in children)
                point("spawn.woken")
                await self.write(lambda: self.journal.put([self._record(c, "running") for c in children]))
                point("spawn.journaled")
            except BaseException:
                await asyncio.shield(asyncio.gather(*(self._destroy(c) for c in children)))
                raise
        for child in children:
            self._register(child)
        self._standby.want(snapshot)
        ready = (time.perf_counter() - began) * 1000
        timing = SpawnTiming((max(resumed) - began) * 1000, ready, [c.spawn_ms or 0 for c in children])
        return [child.info() for child in children], timing

    def _admit(self, request: SpawnRequest) -> None:
        alive = sum(live.state is not SandboxState.DEAD for live in self._live.values())
        if alive + request.n > self.config.max_sandboxes:
            raise NoSlot(
                f"{alive} sandboxes are alive and {request.n} more would pass the limit of"
                f" {self.config.max_sandboxes}",
                hint="kill some, or raise max_sandboxes",
            )
        if (free := process.available_mib()) < request.n * _MIB_PER_CHILD:
            raise NoSlot(
                f"{request.n} more sandboxes need about {request.n * _MIB_PER_CHILD} MiB; {free} MiB are free"
            )

    def _child(self, snapshot: Snapshot, request: SpawnRequest) -> Live:
        slot = self._slot(SandboxId.new().value, request.memory_limit_mib)
        return Live(slot, snapshot.tag, snapshot.engine, snapshot.accel, int(time.time()), request.ttl_secs)

    async def _start(self, snapshot: Snapshot, child: Live) -> float:
        """From nothing to confirmed awake; returns when it was resumed."""
        async with self._turns:
            began = time.perf_counter()
            if child.handle is None:
                child.handle = await self.work(lambda: self.prepare(snapshot, child.slot))
            handle = child.handle
            point("spawn.started")
            await self.work(lambda: self.engine.resume(handle))
            resumed = time.perf_counter()
            link = await child.attach(handle)
            await link.hello(self.config.wake_timeout_secs)
            await guest.wake(link, child.id[:15], self.config.wake_timeout_secs)
            child.spawn_ms = round((time.perf_counter() - began) * 1000, 3)
            return resumed

    def prepare(self, snapshot: Snapshot, slot: Slot) -> Any:
        slot.dir.mkdir(mode=0o700)
        return self.engine.prepare(snapshot, slot)

    def _record(self, live: Live, state: str = "starting", purpose: str = "sandbox") -> Record:
        return Record(
            id=live.id,
            tag=live.tag,
            purpose=purpose,
            state=state,
            boot_id=self._boot,
            created_at_unix=live.created_at_unix,
            accel=live.accel.value,
            pid=live.handle.pid if live.handle else None,
            guest_port=live.address.port if live.address else None,
            memory_limit_mib=live.slot.memory_limit_mib,
            ttl_secs=live.ttl_secs,
        )

    def _died(self, live: Live) -> None:
        live.state = SandboxState.DEAD
        live.reason = self.engine.died_of(live.slot)
        self._background(self._bury(live))

    async def _bury(self, live: Live) -> None:
        """Free what a dead sandbox held; its line in the listing stays, to say why."""
        await self._destroy(live)
        dead = [other for other in self._live.values() if other.state is SandboxState.DEAD]
        for old in dead[:-_DEAD_KEPT]:
            del self._live[old.id]

    async def _destroy(self, live: Live) -> None:
        await live.detach()
        if live.handle is not None:
            handle = live.handle
            await self.work(lambda: self.engine.stop(handle))
            await self._remove_folder(live.slot)
        else:
            await self._discard(live.slot)

    async def _discard(self, slot: Slot) -> None:
        """End and remove whatever carries this slot's id."""
        await self.work(lambda: self.engine.sweep(slot))
        await self._remove_folder(slot)

    async def _remove_folder(self, slot: Slot) -> None:
        await self.work(lambda: shutil.rmtree(slot.dir, ignore_errors=True))
        await self.write(lambda: self.journal.forget([slot.id]))

    def _find(self, sandbox_id: SandboxId) -> Live:
        try:
            return self._live[sandbox_id.value]
        except KeyError:
            raise NoSandbox(sandbox_id) from None

    def sandboxes(self) -> list[SandboxInfo]:
        return [live.info() for _, live in sorted(self._live.items())]

    def sandbox(self, sandbox_id: SandboxId) -> SandboxInfo:
        return self._find(sandbox_id).info()

    async def kill(self, sandbox_id: SandboxId) -> None:
        live = self._live.pop(self._find(sandbox_id).id)
        await asyncio.shield(self._destroy(live))

    def touch(self, sandbox_id: SandboxId) -> SandboxInfo:
        live = self._find(sandbox_id)
        live.touched = time.monotonic()
        return live.info()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1)
            for live in [one for one in self._live.values() if one.expired]:
                self._live.pop(live.id, None)
                await self._destroy(live)

    # -- talking to one

    async def ping(self, sandbox_id: SandboxId) -> dict[str, Any]:
        return await guest.ping(self._find(sandbox_id).agent())

    async def exec(self, sandbox_id: SandboxId, request: ExecRequest) -> ExecResult:
        return await guest.run(self._find(sandbox_id).agent(), request)

    async def eval(self, sandbox_id: SandboxId, code: str, timeout_secs: float) -> EvalResult:
        return await guest.evaluate(self._find(sandbox_id).agent(), code, timeout_secs)

    async def stats(self, sandbox_id: SandboxId) -> dict[str, Any]:
        live = self._find(sandbox_id)
        inside = await guest.stats(live.agent())
        assert live.handle is not None
        return {**inside, "private_kib": process.private_kib(live.handle.pid)}

    def read_file(self, sandbox_id: SandboxId, path: str) -> AsyncIterator[bytes]:
        return guest.read_file(self._find(sandbox_id).agent(), path)

    async def write_file(
        self, sandbox_id: SandboxId, path: str, chunks: AsyncIterator[bytes], mode: int | None
    ) -> int:
        return await guest.write_file(self._find(sandbox_id).agent(), path, chunks, mode)

    # -- snapshots and images

    async def create_snapshot(self, request: CreateSnapshot) -> Snapshot:
        made = await parents.create(self, request)
        self._standby.want(made, self.config.standby)
        return made

    def snapshots(self) -> list[Snapshot]:
        return self.store.list()

    def snapshot(self, tag: Tag) -> Snapshot:
        return self.store.get(tag)

    def snapshot_detail(self, tag: Tag) -> dict[str, Any]:
        found = self.store.get(tag)
        sizes = {name: (found.dir / name).stat() for name in found.sizes if (found.dir / name).exists()}
        memory, state = sizes.get("memory.bin"), sizes.get("vmstate")
        return {
            **found.as_dict(),
            "memory_logical_bytes": memory.st_size if memory else 0,
            "memory_physical_bytes": memory.st_blocks * 512 if memory else 0,
            "vmstate_bytes": state.st_size if state else 0,
            "chain_depth": 0,
            "dependents": [],
            "ancestors": [],
            "vmm": found.vmm,
            "image_key": found.image_key,
            "digests": found.digests,
        }

    async def delete_snapshot(self, tag: Tag, *, cascade: bool, force: bool) -> None:
        del cascade  # nothing depends on a snapshot yet but sandboxes
        children = sorted(
            live.id
            for live in self._live.values()
            if live.tag == tag.value and live.state is not SandboxState.DEAD
        )
        if children and not force:
            raise InUse(
                f"snapshot {tag} has {len(children)} live sandboxes: {', '.join(children[:10])}",
                hint=f"kill them first (forkd kill --tag {tag}), or force: their bytes then go with the last of them",
            )
        self.store.get(tag)
        await self._standby.drop(tag.value)
        await self.work(lambda: self.store.remove(tag))

    async def set_standby(self, tag: Tag, size: int) -> None:
        snapshot = self.store.get(tag)
        self._standby.want(snapshot, size)
        await self._standby.settled(tag.value)

    def images(self) -> list[Image]:
        return images.list_images(self.config.images)

    async def host_report(self) -> dict[str, Any]:
        return await self.work(lambda: report(self.config, self.engine, self.images()))

    def counts(self) -> dict[str, Any]:
        by_state: dict[tuple[str, str], int] = {}
        for live in self._live.values():
            key = (live.engine.value, live.state.value)
            by_state[key] = by_state.get(key, 0) + 1
        return {"snapshots": len(self.store.tags()), "sandboxes": by_state, "standby": self._standby.size()}

    # -- threads

    async def work(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    async def write(self, call: Callable[[], T]) -> T:
        """On the journal's one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def _slot(self, name: str, memory_limit_mib: int | None = None) -> Slot:
        return Slot(name, self.config.run / name, memory_limit_mib)


async def _all(calls: Any) -> list[float]:
    """Every call to its end, then the first failure if there was one: nobody is cancelled half-way."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in done if isinstance(outcome, float)]
