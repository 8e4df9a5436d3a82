"""Making a snapshot: boot a parent, warm it through its agent, capture it, publish it.

On failure the parent is gone and the tag free before the error returns.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from forkd import guest, images
from forkd.agent_link import AgentLink
from forkd.engines.microvm.engine import make_overlay
from forkd.errors import BadField, EngineFailed
from forkd.live import Live
from forkd.models import CreateSnapshot, Image, Machine, Snapshot
from forkd.names import ImageName, SandboxId, Tag
from forkd.store import Staging

if TYPE_CHECKING:
    from forkd.runtime import Runtime

_WARM_SECS = 600


async def create(runtime: Runtime, request: CreateSnapshot) -> Snapshot:
    tag = Tag(request.tag)
    image = await runtime.work(lambda: _image(runtime, request))
    machine = Machine(
        vcpus=request.vcpus or image.machine.vcpus, memory_mib=request.memory_mib or image.machine.memory_mib
    )
    accel = await runtime.work(lambda: runtime.engine.choose_accel(request.accel, image))
    with runtime.store.stage(tag, machine.memory_mib << 20) as staging:
        slot = runtime._slot(SandboxId.new().value)
        live = Live(slot, tag.value, runtime.engine.name, accel, int(time.time()))
        await runtime.write(lambda: runtime.journal.put([runtime._record(live, purpose="parent")]))
        try:
            slot.dir.mkdir(mode=0o700)
            live.handle = await runtime.work(
                lambda: runtime.engine.warm(image, machine, accel, staging.path, slot)
            )
            await _warm(runtime, live, image, request)
            handle = live.handle
            captured = await runtime.work(lambda: runtime.engine.capture(handle, staging.path))
        finally:
            await asyncio.shield(runtime._destroy(live))
        manifest = {
            "engine": runtime.engine.name.value,
            "accel": accel.value,
            "machine": asdict(machine),
            "image_key": image.key,
            "rootfs": str(image.rootfs),
            "vmm": captured.vmm,
        }
        return await runtime.work(lambda: _publish(runtime, staging, image, manifest, captured.files))


async def _warm(runtime: Runtime, live: Live, image: Image, request: CreateSnapshot) -> None:
    link = await AgentLink.connect(live.slot.agent_socket)
    try:
        await link.hello(request.boot_wait_secs)
        await guest.warm(link, image.warmup, image.env, _WARM_SECS)
    except EngineFailed as e:
        console = live.slot.dir / "console.log"
        said = console.read_text(errors="replace")[-600:].strip() if console.exists() else ""
        raise EngineFailed(
            "boot the parent", f"{e}; {runtime.engine.died_of(live.slot)}; its console: {said}"
        ) from e
    finally:
        await link.close()


def _publish(
    runtime: Runtime, staging: Staging, image: Image, manifest: dict[str, object], files: tuple[str, ...]
) -> Snapshot:
    # An empty overlay, made once: each child copies these few bytes instead of running qemu-img.
    make_overlay(staging.path / "overlay.qcow2", image.rootfs)
    return runtime.store.commit(staging, manifest, (*files, "overlay.qcow2"))


def _image(runtime: Runtime, request: CreateSnapshot) -> Image:
    if request.image is not None:
        return images.find_image(runtime.config.images, ImageName(request.image).value)
    assert request.kernel is not None
    assert request.rootfs is not None
    kernel = _open("kernel", request.kernel, runtime)
    try:
        rootfs = _open("rootfs", request.rootfs, runtime)
        try:
            return images.adopt_files(
                runtime.config.images,
                Path(f"/proc/self/fd/{kernel}"),
                Path(f"/proc/self/fd/{rootfs}"),
                Machine(memory_mib=request.memory_mib or 512, vcpus=request.vcpus or 1),
            )
        finally:
            os.close(rootfs)
    finally:
        os.close(kernel)


def _open(field: str, path: Path, runtime: Runtime) -> int:
    """Opened once, checked as opened, and only from where the operator allows."""
    roots = [root.resolve() for root in (*runtime.config.image_roots, runtime.config.images)]
    if not any(path.parent.resolve().is_relative_to(root) for root in roots):
        allowed = ", ".join(map(str, roots))
        raise BadField(
            field, f"{path} is outside the allowed folders", hint=f"allowed: {allowed}; add with --image-root"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise BadField(field, f"{path} cannot be opened: {e.strerror}") from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadField(field, f"{path} is not a regular file")
    return fd
