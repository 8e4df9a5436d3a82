from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forkd.errors import BadField, Conflict, Corrupt, InUse, NoImage
from forkd.images import Recipe, adopt_files, build, find_image, list_images, remove_image
from forkd.images.cache import Cache
from forkd.images.files import beneath, copy_sparse
from forkd.images.tools import Silent
from forkd.models import Image, Machine

KERNEL = b"\0" * 0x202 + b"HdrS" + b"\0" * 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A root filesystem as a folder: small, but with all that a build asks for."""
    root = tmp_path / "source"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3.11").write_text("not really\n")
    (root / "usr/bin/python3").symlink_to("python3.11")
    (root / "bin").symlink_to("usr/bin")
    return root


@pytest.fixture
def recipe(source: Path) -> Recipe:
    return Recipe(name="small", source=source, disk_mib=8, warmup="import json", env={"A": "1"})


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "bzImage"
    path.write_bytes(KERNEL)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "images"


def debugfs(image: Image, *commands: str) -> str:
    argv = [str(shutil.which("debugfs", path="/usr/sbin:/sbin")), "-f", "-", str(image.rootfs)]
    text = "\n".join(commands)
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout


def staged(images: Path) -> list[Path]:
    return list((images / ".cache/staging").iterdir())


def test_a_folder_becomes_an_image(recipe: Recipe, kernel: Path, images: Path, tmp_path: Path) -> None:
    script = tmp_path / "tool"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o751)
    recipe = replace(recipe, files={"/opt/my/tool": script, "/bin/other": script})
    image = build(recipe, images, kernel=kernel)
    assert (image.name, image.warmup, image.env) == ("small", "import json", {"A": "1"})
    assert image.kernel.read_bytes() == KERNEL
    assert image.disk_bytes == 8 << 20
    assert {stat.S_IMODE(p.stat().st_mode) for p in (image.kernel, image.initrd, image.rootfs)} == {0o444}
    out = debugfs(image, "stat /opt/my/tool", "ls -l /usr/bin", "cat /etc/hostname", "stat /proc", "features")
    assert "Mode:  0751" in out
    assert "other" in out  # /bin is a link to usr/bin inside the guest, and was followed there
    assert "forkd" in out
    assert "Type: directory" in out
    assert "has_journal" not in out
    assert "64bit" not in out
    assert find_image(images, "small") == image
    assert list_images(images) == [image]
    assert staged(images) == []


def test_a_tar_becomes_the_same_kind_of_image(
    recipe: Recipe, source: Path, kernel: Path, images: Path, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "root.tar.gz", "w:gz") as tar:
        tar.add(source, arcname=".")
    image = build(replace(recipe, source=tmp_path / "root.tar.gz"), images, kernel=kernel)
    assert "python3.11" in debugfs(image, "ls /usr/bin")


def test_links_in_a_root_filesystem_lead_nowhere_on_the_host(
    recipe: Recipe, source: Path, kernel: Path, images: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (source / "etc").symlink_to(outside)
    (source / "up").symlink_to("../../../../../../../../" + str(outside))
    image = build(replace(recipe, files={"/up/x": kernel}), images, kernel=kernel)
    assert list(outside.iterdir()) == []
    assert "hostname" in debugfs(image, f"ls {outside}")


@pytest.mark.parametrize(
    ("path", "where"),
    [("/a/b", "a/b"), ("/abs/x", "etc/x"), ("/rel/x", "etc/x"), ("/up/x", "x"), ("/two/x", "etc/x")],
)
def test_paths_stay_beneath_the_root(tmp_path: Path, path: str, where: str) -> None:
    for name, target in {"abs": "/etc", "rel": "./etc", "up": "../../..", "two": "/abs"}.items():
        (tmp_path / name).symlink_to(target)
    assert beneath(tmp_path, path) == tmp_path / where


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("/a")
    with pytest.raises(BadField, match="loop"):
        beneath(tmp_path, "/a/x")


def test_a_root_filesystem_without_python_is_refused(
    recipe: Recipe, source: Path, kernel: Path, images: Path
) -> None:
    (source / "usr/bin/python3").unlink()
    with pytest.raises(BadField, match="no python3"):
        build(recipe, images, kernel=kernel)
    assert staged(images) == []
    assert list_images(images) == []


def test_a_disk_too_small_names_the_setting(recipe: Recipe, source: Path, kernel: Path, images: Path) -> None:
    (source / "big").write_bytes(os.urandom(9 << 20))
    with pytest.raises(BadField) as refused:
        build(recipe, images, kernel=kernel)
    assert refused.value.field == "machine.disk_mib"


def test_what_is_no_kernel_is_refused(recipe: Recipe, images: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(BadField) as refused:
            build(recipe, images, kernel=path)
        assert refused.value.field == "kernel"


def change_tree(recipe: Recipe) -> Recipe:
    assert recipe.source is not None
    (recipe.source / "new").write_text("x")
    return recipe


def change_mode(recipe: Recipe) -> Recipe:
    next(iter(recipe.files.values())).chmod(0o700)
    return recipe


CHANGES: dict[str, Callable[[Recipe], Recipe]] = {
    "tree": change_tree,
    "mode of a file": change_mode,
    "warm-up": lambda r: replace(r, warmup="import re"),
    "environment": lambda r: replace(r, env={"A": "2"}),
    "memory": lambda r: replace(r, machine=Machine(memory_mib=512)),
    "disk": lambda r: replace(r, disk_mib=9),
    "place of a file": lambda r: replace(r, files={"/opt/b": r.files["/opt/a"]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_follows_everything_that_decides_the_content(
    recipe: Recipe, kernel: Path, images: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "a").write_text("a")
    recipe = replace(recipe, files={"/opt/a": tmp_path / "a"})
    first = build(recipe, images, kernel=kernel)
    assert build(recipe, images, kernel=kernel) == first
    second = build(CHANGES[change](recipe), images, kernel=kernel)
    assert second.key != first.key
    assert find_image(images, "small") == second
    assert first.rootfs.exists()  # snapshots may stand on it


def test_a_changed_warm_up_shares_kernel_and_disk(recipe: Recipe, kernel: Path, images: Path) -> None:
    first = build(recipe, images, kernel=kernel)
    second = build(replace(recipe, warmup="import re"), images, kernel=kernel)
    assert first.rootfs.stat().st_ino == second.rootfs.stat().st_ino
    assert first.kernel.stat().st_ino == second.kernel.stat().st_ino


def test_force_builds_anew_beside_the_old_and_wins(recipe: Recipe, kernel: Path, images: Path) -> None:
    first = build(recipe, images, kernel=kernel)
    before = first.rootfs.stat()
    second = build(recipe, images, kernel=kernel, force=True)
    assert second.key != first.key
    assert second.rootfs.stat().st_ino != before.st_ino
    assert first.rootfs.stat().st_ino == before.st_ino
    assert find_image(images, "small") == second


def test_going_back_to_an_earlier_recipe_makes_its_image_current(
    recipe: Recipe, kernel: Path, images: Path
) -> None:
    first = build(recipe, images, kernel=kernel)
    build(replace(recipe, warmup="import re"), images, kernel=kernel)
    assert build(recipe, images, kernel=kernel) == first
    assert find_image(images, "small") == first


def test_a_recipe_that_changes_under_the_build_is_not_cached(
    recipe: Recipe, source: Path, kernel: Path, images: Path
) -> None:
    class Meddles(Silent):
        def line(self, text: str) -> None:
            (source / "late").write_text("x")

    with pytest.raises(Conflict, match="changed while"):
        build(recipe, images, kernel=kernel, progress=Meddles())
    assert list_images(images) == []


def test_removing_frees_what_no_other_image_shares(recipe: Recipe, kernel: Path, images: Path) -> None:
    build(recipe, images, kernel=kernel)
    other = build(replace(recipe, name="other"), images, kernel=kernel)
    with pytest.raises(InUse):
        remove_image(images, "other", in_use={other.key})
    remove_image(images, "small")
    assert [image.name for image in list_images(images)] == ["other"]
    assert len(list((images / ".cache/rootfs").iterdir())) == 1
    remove_image(images, "other")
    assert list((images / ".cache/rootfs").iterdir()) == []
    assert list((images / ".cache/kernel").iterdir()) == []
    for call in (remove_image, find_image):
        with pytest.raises(NoImage):
            call(images, "other")


def test_a_damaged_image_is_named_not_used_and_not_overwritten(
    recipe: Recipe, kernel: Path, images: Path
) -> None:
    first = build(recipe, images, kernel=kernel)
    (first.rootfs.parent / "image.json").unlink()
    (first.rootfs.parent / "image.json").write_text("{")
    with pytest.raises(Corrupt, match=r"image\.json"):
        find_image(images, "small")
    assert list_images(images) == []
    inode = first.rootfs.stat().st_ino
    second = build(recipe, images, kernel=kernel)
    assert second.key != first.key
    assert first.rootfs.stat().st_ino == inode


def put_kernel_with_module(images: Path) -> None:
    cache = Cache(images)
    with cache.opened(), cache.stage() as stage:
        (stage / "out/modules").mkdir(parents=True)
        (stage / "out/kernel").write_bytes(KERNEL)
        (stage / "out/modules/00-virtio.ko").write_bytes(os.urandom(200_000))
        described = {"sha256": hashlib.sha256(KERNEL).hexdigest(), "modules": ["virtio.ko"]}
        (stage / "out/kernel.json").write_text(json.dumps(described))
        cache.commit(stage / "out", cache.entry("kernel", "known"))


def test_files_are_adopted_by_content(recipe: Recipe, kernel: Path, images: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk.ext4"
    shutil.copy(build(recipe, tmp_path / "elsewhere", kernel=kernel).rootfs, disk)
    with disk.open("rb") as opened:
        path = Path(f"/proc/self/fd/{opened.fileno()}")
        image = adopt_files(images, kernel, path, Machine(vcpus=2))
    assert image.name == f"adhoc-{image.key[:12]}"
    assert image.machine == Machine(vcpus=2)
    assert image.rootfs.read_bytes() == disk.read_bytes()
    assert adopt_files(images, kernel, disk, Machine(vcpus=2)) == image
    assert adopt_files(images, kernel, disk, Machine()).key != image.key
    with pytest.raises(BadField) as refused:
        adopt_files(images, kernel, kernel, Machine())
    assert refused.value.field == "rootfs"


def test_a_known_kernel_comes_with_its_modules(
    recipe: Recipe, kernel: Path, images: Path, tmp_path: Path
) -> None:
    bare = build(recipe, tmp_path / "elsewhere", kernel=kernel)
    put_kernel_with_module(images)
    image = adopt_files(images, kernel, bare.rootfs, Machine())
    assert image.initrd.stat().st_size > bare.initrd.stat().st_size + 190_000


def test_a_copy_keeps_holes_and_bytes(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as f:
        f.truncate(64 << 20)
        f.seek(32 << 20)
        f.write(b"middle")
    copy_sparse(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").stat().st_size == 64 << 20
    assert (tmp_path / "b").stat().st_blocks < 2048
    assert (tmp_path / "b").read_bytes()[32 << 20 :][:6] == b"middle"
