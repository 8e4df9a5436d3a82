"""Building an image: kernel, root filesystem and initrd, each from its cache, put together as one folder.

On failure or interruption nothing changed: no folder, no process, no mount.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from forkd.errors import BadField, NoSpace
from forkd.images import catalog, initrd, tools
from forkd.images import kernel as kernels
from forkd.images import rootfs as disks
from forkd.images.cache import Cache
from forkd.images.files import copy_sparse, digest_file, digest_values
from forkd.images.host import this_host
from forkd.images.kernel import Kernel
from forkd.images.recipe import Recipe
from forkd.images.tools import Progress, Silent
from forkd.models import Image, Machine

_EXT4_MAGIC_AT = 1024 + 56


def build(
    recipe: Recipe,
    images_dir: Path,
    *,
    kernel: Path | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Image:
    """The image of `recipe`; at once if it was built from the same inputs before.

    `kernel` takes a kernel file instead of the distribution's package. `force`
    builds everything anew, under a new key: snapshots of the old one keep their files.
    """
    progress = progress or Silent()
    if kernel is not None:
        _check_is_file("kernel", kernel)
    cache = Cache(images_dir)
    with _unwinding(), cache.opened(), cache.lock("image", recipe.name, progress):
        inputs = _inputs(recipe, kernel)
        image = None if force else catalog.find_built(cache.images, recipe.name, inputs)
        if image is None:
            image = _build(cache, recipe, inputs, kernel, progress, force=force)
        catalog.set_current(cache.images, image)
        return image


def adopt_files(
    images_dir: Path, kernel: Path, rootfs: Path, machine: Machine, progress: Progress | None = None
) -> Image:
    """An image named adhoc-<key> from copies of a kernel file and an ext4 file.

    A kernel that equals that of an image gets its modules; any other must have virtio and ext4 built in.
    """
    progress = progress or Silent()
    _check_is_file("kernel", kernel)
    _check_is_file("rootfs", rootfs)
    cache = Cache(images_dir)
    with _unwinding(), cache.opened(), cache.stage() as stage:
        progress.stage("copy")
        chosen = kernels.from_file(cache, kernel, progress)
        copy = stage / "rootfs.ext4"
        copy_sparse(rootfs, copy)
        _check_is_ext4(copy)
        parts = [chosen.sha256, digest_file(copy), initrd.content_key(), asdict(machine)]
        inputs = digest_values(parts)
        name = f"adhoc-{inputs[:12]}"
        with cache.lock("image", name, progress):
            image = catalog.find_built(cache.images, name, inputs)
            if image is None:
                recipe = Recipe(name=name, machine=machine)
                image = _assemble(cache, recipe, inputs, chosen, copy)
            catalog.set_current(cache.images, image)
            return image


def _inputs(recipe: Recipe, given: Path | None) -> str:
    host = this_host()
    chosen = digest_file(given) if given else kernels.package_key(recipe.kernel_package, host)
    return digest_values(
        {
            "kernel": chosen,
            "rootfs": disks.content_key(recipe, host),
            "initrd": initrd.content_key(),
            "machine": asdict(recipe.machine),
            "env": recipe.env,
            "warmup": recipe.warmup,
        }
    )


def _build(
    cache: Cache, recipe: Recipe, inputs: str, given: Path | None, progress: Progress, *, force: bool
) -> Image:
    host = this_host()
    # All at once and first: a newcomer should not learn of them one by one, minutes apart.
    fetching = [] if given else ["apt-get", "apt-cache", "dpkg-deb", "depmod"]
    tools.need("busybox", *fetching, *disks.needed_tools(recipe))
    initrd.static_busybox()
    progress.stage("kernel")
    if given is not None:
        chosen = kernels.from_file(cache, given, progress)
    else:
        chosen = kernels.from_package(cache, recipe.kernel_package, host, progress, force=force)
    progress.stage("rootfs")
    disk = disks.make(cache, recipe, host, progress, force=force)
    progress.stage("initrd")
    return _assemble(cache, recipe, inputs, chosen, disk)


def _assemble(cache: Cache, recipe: Recipe, inputs: str, chosen: Kernel, disk: Path) -> Image:
    # Never over a folder that exists, even a damaged one: snapshots may stand on its files.
    taken = (cache.images / recipe.name / inputs).exists()
    key = digest_values([inputs, secrets.token_hex(16)]) if taken else inputs
    folder = cache.images / recipe.name / key
    image = Image(
        name=recipe.name,
        key=key,
        kernel=folder / "kernel",
        initrd=folder / "initrd",
        rootfs=folder / "rootfs.ext4",
        machine=recipe.machine,
        warmup=recipe.warmup,
        env=dict(recipe.env),
        created_at_unix=int(time.time()),
    )
    with cache.stage() as stage:
        out = stage / "out"
        out.mkdir()
        os.link(chosen.image, out / "kernel")
        os.link(disk, out / "rootfs.ext4")
        initrd.write_initrd(out / "initrd", chosen.modules)
        catalog.write_description(out, image, inputs)
        cache.commit(out, folder)
    return image


def _check_is_file(field: str, path: Path) -> None:
    if not path.is_file():  # a FIFO would block the first read for ever
        raise BadField(field, f"{path} does not exist or is not a regular file")


def _check_is_ext4(path: Path) -> None:
    with path.open("rb") as f:
        f.seek(_EXT4_MAGIC_AT)
        if f.read(2) != b"\x53\xef":
            raise BadField("rootfs", "is not an ext4 filesystem")


@contextmanager
def _unwinding() -> Iterator[None]:
    """Make SIGTERM leave through the cleanup, and a full disk say what it is.

    A program with a handler of its own keeps it, and only the main thread may set one.
    """
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise NoSpace("no space left for the image", hint="free some space, then build again") from e
        raise
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)
