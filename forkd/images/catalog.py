"""Built images as others see them: reading, listing, finding and removing. Building is in `build`."""

from __future__ import annotations

import json
import logging
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forkd.errors import Corrupt, InUse, NoImage
from forkd.images.cache import Cache
from forkd.models import Image, Machine
from forkd.names import ImageName

log = logging.getLogger(__name__)

FORMAT = 1
_CURRENT = "current"


def list_images(images_dir: Path) -> list[Image]:
    """The current image of every name. One that cannot be read is logged and left out."""
    found: list[Image] = []
    for link in sorted(images_dir.glob(f"*/{_CURRENT}")):
        try:
            found.append(read_image(link.resolve()))
        except Corrupt as e:
            log.warning("%s", e)
    return found


def find_image(images_dir: Path, name: str) -> Image:
    link = images_dir / ImageName(name).value / _CURRENT
    if not link.exists():
        raise NoImage(name)
    return read_image(link.resolve())


def find_built(images_dir: Path, name: str, inputs: str) -> Image | None:
    """The newest image built from these inputs."""
    found: list[Image] = []
    for path in (images_dir / name).glob("*/image.json"):
        try:
            if not path.parent.is_symlink() and _load(path).get("inputs") == inputs:
                found.append(read_image(path.parent))
        except Corrupt as e:
            log.warning("%s", e)
    return max(found, key=lambda image: image.created_at_unix, default=None)


def remove_image(images_dir: Path, name: str, *, in_use: Container[str] = ()) -> None:
    """Remove every build of `name`, and cached parts that no other image shares.

    `in_use` holds the keys of images that snapshots stand on: such an image stays.
    """
    ImageName(name)
    cache = Cache(images_dir)
    with cache.opened(), cache.try_lock("image", name) as free:
        folder = cache.images / name
        if not folder.is_dir():
            raise NoImage(name)
        if any(path.name in in_use for path in folder.iterdir()):
            raise InUse(f"image {name} is in use by a snapshot", hint="delete its snapshots first")
        if not free:
            raise InUse(f"image {name} is being built", hint="wait for that build, or interrupt it")
        with cache.stage() as stage:
            folder.rename(stage / "removed")
    cache.prune()


def read_image(folder: Path) -> Image:
    found = _load(folder / "image.json")
    try:
        image = Image(
            name=found["name"],
            key=found["key"],
            kernel=folder / "kernel",
            initrd=folder / "initrd",
            rootfs=folder / "rootfs.ext4",
            machine=Machine(**found["machine"]),
            warmup=found["warmup"],
            env=dict(found["env"]),
            created_at_unix=found["created_at_unix"],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise Corrupt(f"{folder / 'image.json'} is not an image's description: {e!r}", hint=_REBUILD) from e
    for path in (image.kernel, image.initrd, image.rootfs):
        if not path.is_file():
            raise Corrupt(f"image {image.name} lacks its file {path}", hint=_REBUILD)
    return image


def write_description(folder: Path, image: Image, inputs: str) -> None:
    """`inputs` is the digest of all that decided the content: a build with the same one is a cache hit."""
    fields = ("name", "key", "warmup", "env", "created_at_unix")
    described: dict[str, Any] = {name: getattr(image, name) for name in fields}
    described |= {"format": FORMAT, "inputs": inputs, "machine": asdict(image.machine)}
    (folder / "image.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def set_current(images_dir: Path, image: Image) -> None:
    link = images_dir / image.name / _CURRENT
    if link.is_symlink() and str(link.readlink()) == image.key:
        return
    fresh = link.with_name(f".{_CURRENT}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(image.key)
    fresh.replace(link)


_REBUILD = "`forkd image rm` it and build it again"


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise Corrupt(f"cannot read {path}: {e}", hint=_REBUILD) from e
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise Corrupt(f"{path} is of an unknown format", hint=_REBUILD)
    return found
