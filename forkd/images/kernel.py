"""Kernels in the cache: the distribution's package, unpacked but never installed, or a given file.

An entry holds `kernel`, `kernel.json` and, in load order, the modules an initrd needs.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import BadField, EngineFailed, Unsupported
from forkd.images import tools
from forkd.images.cache import Cache
from forkd.images.files import copy_sparse, digest_file, digest_values
from forkd.images.host import Host
from forkd.images.tools import Progress

_FORMAT = 1  # bump when the same package would give other bytes in the cache
_CANDIDATES = {
    "debian": ["linux-image-cloud-amd64", "linux-image-amd64"],
    "ubuntu": ["linux-image-kvm", "linux-image-virtual", "linux-image-generic"],
}
# ext4 asks for "crc32c" by alias, which no file names as a dependency, so it comes first.
_OPTIONAL = ["crc32c_generic", "virtio_net", "virtio_rng", "overlay"]
_REQUIRED = ["virtio_mmio", "virtio_blk", "virtio_console", "ext4"]
_LOAD = [_OPTIONAL[0], *_REQUIRED, *_OPTIONAL[1:]]


@dataclass(frozen=True, slots=True)
class Kernel:
    image: Path
    modules: list[Path]  # in the order to load them
    sha256: str


def package_key(package: str | None, host: Host) -> str:
    wanted = [package] if package else _candidates(host)
    return digest_values({"format": _FORMAT, "packages": wanted, "suite": host.suite, "arch": host.arch})


def from_package(
    cache: Cache, package: str | None, host: Host, progress: Progress, *, force: bool = False
) -> Kernel:
    key = package_key(package, host)
    target = cache.entry("kernel", key)
    with cache.lock("kernel", key[:2], progress):
        if force or not target.exists():
            with cache.stage() as stage:
                names = resolve([package] if package else _candidates(host))
                _download(names, stage, progress)
                _extract(stage, progress)
                cache.commit(stage / "out", target)
    return _read(target)


def from_file(cache: Cache, path: Path, progress: Progress) -> Kernel:
    """Take a kernel file. One that equals a cached kernel comes with its modules, any other with none."""
    with cache.stage() as stage:
        out = stage / "out"
        out.mkdir()
        copy_sparse(path, out / "kernel")
        _check_is_kernel(out / "kernel")
        sha256 = digest_file(out / "kernel")
        for entry in cache.entries("kernel"):
            if (known := _read(entry)).sha256 == sha256:
                return known
        _describe(out, [], sha256)
        with cache.lock("kernel", sha256[:2], progress):
            target = cache.entry("kernel", sha256)
            if not target.exists():
                cache.commit(out, target)
        return _read(target)


def load_order(dependencies: str, builtin: str) -> list[str]:
    """The module files to load, from the text of modules.dep and modules.builtin."""
    needs: dict[str, list[str]] = {}
    paths: dict[str, str] = {}
    for line in dependencies.splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        paths[_module_name(path)] = path
    inside = {_module_name(line) for line in builtin.splitlines()}
    order: list[str] = []

    def load(path: str) -> None:
        if path not in order:
            for need in reversed(needs[path]):  # depmod lists the nearest need first
                load(need)
            order.append(path)

    for name in _LOAD:
        if name in paths:
            load(paths[name])
        elif name in _REQUIRED and name not in inside:
            raise Unsupported(
                f"the kernel has no {name}, which a microVM needs",
                hint='say another one in the recipe: [kernel] package = "linux-image-cloud-amd64"',
            )
    return order


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0].replace("-", "_")


def _candidates(host: Host) -> list[str]:
    return _CANDIDATES.get(host.distribution, _CANDIDATES["debian"])


def resolve(candidates: list[str]) -> list[str]:
    """The packages that hold the files, behind the first candidate apt knows."""
    for candidate in candidates:
        holders: list[str] = []
        todo = [candidate]
        while todo:
            name = todo.pop()
            more = _kernel_parts(name)
            if more is None:
                continue
            # A package that points at another linux-image- is a meta package, empty itself.
            if not any(part.startswith("linux-image-") for part in more):
                holders.append(name)
            todo += [part for part in more if part not in holders]
        if holders:
            return sorted(holders)
    raise Unsupported(
        f"apt knows no kernel package of the name {' or '.join(candidates)}",
        hint="`apt-get update` fetches the package lists; or give a kernel with --kernel FILE",
    )


def _kernel_parts(package: str) -> list[str] | None:
    """The kernel packages this one depends on; None if apt does not know it."""
    text = tools.ask([tools.find("apt-cache"), "show", "--no-all-versions", package])
    if not text:
        return None
    found = re.search(r"^Depends: (.*)$", text, re.MULTILINE)
    names = [re.split(r"[ (|:]", word.strip())[0] for word in found[1].split(",")] if found else []
    return [name for name in names if re.match(r"linux-(image|modules)-", name)]


def _download(names: list[str], stage: Path, progress: Progress) -> None:
    folder = stage / "download"
    folder.mkdir()
    try:
        argv = [str(tools.find("apt-get")), "-o", "APT::Sandbox::User=root", "download", *names]
        tools.run(argv, progress, cwd=folder)
    except EngineFailed as e:
        raise EngineFailed(
            "download the kernel",
            str(e),
            hint="if the version is gone from the archive, `apt-get update` finds the new one",
        ) from e
    for package in sorted(folder.glob("*.deb")):
        progress.line(f"unpacking {package.name}")
        tools.run([tools.find("dpkg-deb"), "-x", package, stage / "tree"], progress)


def _extract(stage: Path, progress: Progress) -> None:
    """From the unpacked package to what an image needs: the kernel and a few modules."""
    tree, out = stage / "tree", stage / "out"
    if not (tree / "lib/modules").exists() and (tree / "usr/lib/modules").exists():
        (tree / "lib").mkdir(exist_ok=True)
        (tree / "usr/lib/modules").rename(tree / "lib/modules")  # depmod looks only there
    versions = sorted(p.name for p in (tree / "lib/modules").glob("*") if p.is_dir())
    kernels = sorted((tree / "boot").glob("vmlinuz-*"))
    if len(versions) != 1 or len(kernels) != 1:
        raise EngineFailed("unpack the kernel", f"expected one kernel, found {len(kernels)} of {versions}")
    tools.run([tools.find("depmod"), "-b", tree, versions[0]], progress)
    modules = tree / "lib/modules" / versions[0]
    builtin = (modules / "modules.builtin").read_text()
    order = load_order((modules / "modules.dep").read_text(), builtin)
    (out / "modules").mkdir(parents=True)
    for number, path in enumerate(order):
        name = f"{number:02d}-{_module_name(path)}.ko"
        (out / "modules" / name).write_bytes(_unpacked(modules / path))
    kernels[0].rename(out / "kernel")
    _check_is_kernel(out / "kernel")
    _describe(out, order, digest_file(out / "kernel"))


def _unpacked(module: Path) -> bytes:
    data = module.read_bytes()
    match module.suffix:
        case ".xz":
            return lzma.decompress(data)
        case ".gz":
            return gzip.decompress(data)
        case ".zst":
            done = subprocess.run([tools.find("zstd"), "-dcq"], input=data, capture_output=True, check=True)
            return done.stdout
    return data


def _check_is_kernel(path: Path) -> None:
    with path.open("rb") as f:
        head = f.read(0x210)
    if head[0x202:0x206] != b"HdrS" and head[:4] != b"\x7fELF":
        raise BadField("kernel", "is neither a bzImage nor a vmlinux")


def _describe(out: Path, modules: list[str], sha256: str) -> None:
    (out / "modules").mkdir(exist_ok=True)
    (out / "kernel.json").write_text(json.dumps({"sha256": sha256, "modules": modules}, indent=2))


def _read(entry: Path) -> Kernel:
    described = json.loads((entry / "kernel.json").read_text())
    return Kernel(entry / "kernel", sorted((entry / "modules").iterdir()), described["sha256"])
