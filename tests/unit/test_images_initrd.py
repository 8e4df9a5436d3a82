from __future__ import annotations

import gzip
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from forkd.errors import Unsupported
from forkd.images import cpio, initrd, kernel


def listed(archive: bytes) -> list[str]:
    done = subprocess.run(["cpio", "-itv", "--quiet"], input=archive, capture_output=True, check=True)
    return done.stdout.decode().splitlines()


def unpacked(archive: bytes, into: Path) -> Path:
    into.mkdir()
    argv = ["cpio", "-id", "--quiet", "--no-absolute-filenames"]
    subprocess.run(argv, input=archive, cwd=into, check=True)
    return into


@pytest.mark.skipif(shutil.which("cpio") is None, reason="compares with the cpio program")
def test_the_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    archive = cpio.archive(
        [
            cpio.folder("d"),
            cpio.regular("d/odd", b"12345", 0o755),
            cpio.regular("d/empty", b""),
            cpio.symlink("d/link", "odd"),
            cpio.character("console", 5, 1),
        ]
    )
    lines = listed(archive)
    assert [line.split()[0] for line in lines] == [
        "drwxr-xr-x",
        "-rwxr-xr-x",
        "-rw-r--r--",
        "lrwxrwxrwx",
        "crw-------",
    ]
    assert lines[3].endswith("d/link -> odd")
    assert lines[4].split()[4:6] == ["5,", "1"]
    tree = unpacked(cpio.archive([cpio.folder("d"), cpio.regular("d/odd", b"12345", 0o755)]), tmp_path / "t")
    assert (tree / "d/odd").read_bytes() == b"12345"
    assert stat.S_IMODE((tree / "d/odd").stat().st_mode) == 0o755


def test_equal_content_gives_equal_bytes_and_each_entry_is_aligned() -> None:
    entries = [cpio.regular(f"name{'x' * n}", b"y" * n) for n in range(9)]
    assert cpio.archive(entries) == cpio.archive(list(entries))
    archive = cpio.archive(entries)
    at = 0
    for entry in entries:
        assert archive[at : at + 6] == b"070701"
        size, name_size = int(archive[at + 54 : at + 62], 16), int(archive[at + 94 : at + 102], 16)
        assert (size, name_size) == (len(entry.data), len(entry.path) + 1)
        at += 110 + name_size
        at += -at % 4 + size
        at += -at % 4


DEP = """\
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_mmio.ko.xz: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/char/virtio_console.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/char/hw_random/virtio-rng.ko: kernel/drivers/virtio/virtio.ko
kernel/fs/ext4/ext4.ko: kernel/lib/crc16.ko kernel/fs/mbcache.ko kernel/fs/jbd2/jbd2.ko
kernel/fs/jbd2/jbd2.ko: kernel/lib/crc16.ko
kernel/fs/mbcache.ko:
kernel/lib/crc16.ko:
kernel/crypto/crc32c_generic.ko:
kernel/drivers/gpu/unrelated.ko:
"""


def test_modules_load_after_what_they_need_and_only_once() -> None:
    order = [path.rpartition("/")[2].partition(".")[0] for path in kernel.load_order(DEP, "")]
    assert len(order) == len(set(order))
    assert "unrelated" not in order
    for before, after in [
        ("virtio_ring", "virtio"),
        ("virtio", "virtio_mmio"),
        ("virtio_mmio", "virtio_blk"),
        ("virtio", "virtio-rng"),
        ("crc16", "jbd2"),
        ("jbd2", "ext4"),
        ("crc32c_generic", "ext4"),
    ]:
        assert order.index(before) < order.index(after)


def test_a_builtin_module_is_not_missed_and_an_absent_one_is() -> None:
    no_ext4 = "".join(line for line in DEP.splitlines(keepends=True) if not line.startswith("kernel/fs/ext4"))
    assert "ext4" not in " ".join(kernel.load_order(no_ext4, "kernel/fs/ext4/ext4.ko\n"))
    with pytest.raises(Unsupported, match="no ext4"):
        kernel.load_order(no_ext4, "")


@pytest.fixture
def fake_apt_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `apt-cache` that knows the packages for which the folder has a file."""
    folder = tmp_path / "packages"
    folder.mkdir()
    program = tmp_path / "bin/apt-cache"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nfor last; do :; done\ncat "{folder}/$last" 2>/dev/null\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return folder


def test_a_meta_package_leads_to_the_packages_with_the_files(fake_apt_cache: Path) -> None:
    real = "linux-image-5.15.0-1-kvm"
    (fake_apt_cache / "linux-image-kvm").write_text(f"Depends: {real}, linux-firmware (>= 1)\n")
    (fake_apt_cache / real).write_text("Depends: kmod, linux-modules-5.15.0-1-kvm (= 1) | other\n")
    (fake_apt_cache / "linux-modules-5.15.0-1-kvm").write_text("Package: x\n")
    assert kernel.resolve(["linux-image-absent", "linux-image-kvm"]) == [real, "linux-modules-5.15.0-1-kvm"]


@pytest.mark.usefixtures("fake_apt_cache")
def test_without_package_lists_the_next_step_is_named() -> None:
    with pytest.raises(Unsupported) as refused:
        kernel.resolve(["linux-image-cloud-amd64"])
    assert "apt-get update" in str(refused.value.hint)


@pytest.mark.skipif(shutil.which("cpio") is None, reason="unpacks with the cpio program")
def test_the_initrd_holds_init_busybox_modules_and_agent(tmp_path: Path) -> None:
    module = tmp_path / "00-virtio.ko"
    module.write_bytes(b"module")
    initrd.write_initrd(tmp_path / "initrd", [module])
    packed = (tmp_path / "initrd").read_bytes()
    assert len(packed) < 4 << 20
    tree = unpacked(gzip.decompress(packed), tmp_path / "tree")
    assert (tree / "init").stat().st_mode & 0o111
    assert (tree / "modules/00-virtio.ko").read_bytes() == b"module"
    assert (tree / "forkd/forkd_agent/protocol.py").is_file()
    assert (tree / "bin/switch_root").readlink() == Path("busybox")
    # Every program the script runs must be there as an applet of the busybox that was packed.
    known = subprocess.run([tree / "bin/busybox", "--list"], capture_output=True, text=True, check=True)
    assert {path.name for path in (tree / "bin").iterdir()} - {"busybox"} <= set(known.stdout.split())
    subprocess.run([tree / "bin/busybox", "sh", "-n", tree / "init"], check=True)


def test_a_dynamic_busybox_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy("/bin/ls", tmp_path / "busybox")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported) as refused:
        initrd.static_busybox()
    assert refused.value.hint == "apt-get install -y busybox-static"
