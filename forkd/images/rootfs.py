"""Root filesystems in the cache: a tree from Debian packages, a tar or a folder, turned into an ext4 file.

No code of the guest runs on the host except the packages' own install scripts, inside mmdebstrap's chroot.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import sys
from pathlib import Path

from forkd.errors import BadField, Conflict, EngineFailed, Unsupported
from forkd.images import host as hosts
from forkd.images import tools
from forkd.images.cache import Cache
from forkd.images.files import beneath, digest_file, digest_tree, digest_values
from forkd.images.host import Host
from forkd.images.recipe import Recipe
from forkd.images.tools import Progress

_FORMAT = 1  # bump when the same recipe would give another root filesystem
_EXCLUDED = (
    "/usr/share/man/*",
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/i18n/*",
)
_KEPT = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")
# Named one by one: what a host's mke2fs turns on by itself may be more than an older guest kernel can mount.
# No journal: a child's disk is thrown away with it, and a snapshot is taken whole.
_EXT4_FEATURES = (
    "none,sparse_super,large_file,filetype,dir_index,ext_attr,extent,flex_bg,huge_file,dir_nlink,extra_isize"
)
# Wheels for the C library of the oldest release we build (2.28, Debian 10) and before.
_WHEEL_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux2010")
_MOUNT_POINTS = ("dev", "proc", "run", "sys", "tmp")
_PYTHONS = {"/usr/local/bin/python3": "site-packages", "/usr/bin/python3": "dist-packages"}


def content_key(recipe: Recipe, host: Host) -> str:
    content = ""
    if recipe.source is not None:
        content = digest_tree(recipe.source) if recipe.source.is_dir() else digest_file(recipe.source)
    files = {
        guest: [stat.S_IMODE(path.stat().st_mode), digest_file(path)] for guest, path in recipe.files.items()
    }
    return digest_values(
        {
            "format": _FORMAT,
            "suite": host.suite,
            "arch": host.arch,
            "debian": sorted(recipe.debian),
            "pip": sorted(recipe.pip),
            "files": files,
            "source": content,
            "disk_mib": recipe.disk_mib,
        }
    )


def needed_tools(recipe: Recipe) -> list[str]:
    if recipe.source is None:
        return ["mmdebstrap", "apt-config", "mke2fs", "setpriv", "unshare"]
    return ["cp" if recipe.source.is_dir() else "tar", "mke2fs", "setpriv", "unshare"]


def make(cache: Cache, recipe: Recipe, host: Host, progress: Progress, *, force: bool = False) -> Path:
    key = content_key(recipe, host)
    target = cache.entry("rootfs", key)
    with cache.lock("rootfs", key[:2], progress):
        if force or not target.exists():
            with cache.stage() as stage:
                root = stage / "root"
                root.mkdir()
                root.chmod(0o755)
                _populate(root, recipe, host, stage, progress)
                _install_wheels(root, recipe, stage, progress)
                _install_files(root, recipe)
                _finish(root)
                (stage / "out").mkdir()
                write_ext4(root, stage / "out/rootfs.ext4", recipe.disk_mib, progress)
                if content_key(recipe, host) != key:
                    raise Conflict("the recipe's files changed while they were built", hint="build again")
                cache.commit(stage / "out", target)
    return target / "rootfs.ext4"


def write_ext4(root: Path, target: Path, size_mib: int, progress: Progress) -> None:
    """A sparse ext4 file of `size_mib` holding the tree `root`."""
    progress.line(f"writing a {size_mib} MiB ext4 file system")
    with target.open("xb") as f:
        f.truncate(size_mib << 20)
    options = ["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "forkd", "-O", _EXT4_FEATURES]
    options += ["-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", "-d", str(root)]
    try:
        tools.run([tools.find("mke2fs"), *options, target], progress)
    except EngineFailed as e:
        if not re.search(r"[Cc]ould not allocate|while populating|too small", str(e)):
            raise
        raise BadField(
            "machine.disk_mib",
            f"{size_mib} MiB cannot hold the root filesystem of {_tree_mib(root)} MiB",
            hint="raise disk_mib in the recipe",
        ) from e


def _tree_mib(root: Path) -> int:
    blocks = sum(Path(folder, name).lstat().st_blocks for folder, _, names in os.walk(root) for name in names)
    return blocks * 512 >> 20


def _populate(root: Path, recipe: Recipe, host: Host, stage: Path, progress: Progress) -> None:
    source = recipe.source
    if source is None:
        _debootstrap(root, recipe, host, stage, progress)
    elif source.is_dir():
        tools.run([tools.find("cp"), "-a", "--reflink=auto", f"{source}/.", root], progress)
    else:
        # GNU tar strips leading "/", refuses ".." and writes through no symlink it has just made.
        argv = [str(tools.find("tar")), "-x", "-f", str(source), "-C", str(root), "--numeric-owner"]
        tools.run([*argv, "--xattrs", "--xattrs-include=*"], progress)
        root.chmod(0o755)


def _debootstrap(root: Path, recipe: Recipe, host: Host, stage: Path, progress: Progress) -> None:
    if os.geteuid() != 0:
        raise Unsupported("building from Debian packages needs root", hint="run the build with sudo")
    if not host.suite:
        raise Unsupported(
            "this host's /etc/os-release names no release to build from",
            hint="build on Debian or Ubuntu, or give the recipe a [source] rootfs",
        )
    argv = [str(tools.find("mmdebstrap")), "--mode=root", "--format=directory", "--variant=apt"]
    argv += [f"--include={','.join(recipe.debian)}"]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED]
    argv += [f"--dpkgopt=path-include={pattern}" for pattern in _KEPT]
    # The staging folder is closed to everyone else, and so to apt's own unprivileged user.
    argv += ['--aptopt=APT::Sandbox::User "root";']
    argv += [f"--aptopt={line}" for line in hosts.apt_settings()]
    argv += [host.suite, str(root)]
    if sources := hosts.archive_sources(host.suite):
        (stage / "archive.sources").write_text(sources)
        argv.append(str(stage / "archive.sources"))
    tools.run(argv, progress)
    _forget_host_settings(root)


def _forget_host_settings(root: Path) -> None:
    """The host's proxies and the passwords in its archive addresses stay on the host."""
    (root / "etc/apt/apt.conf.d/99mmdebstrap").unlink(missing_ok=True)
    for path in [root / "etc/apt/sources.list", *(root / "etc/apt/sources.list.d").glob("*")]:
        if path.is_file() and not path.is_symlink():
            path.write_text(re.sub(r"://[^/@\s]+@", "://", path.read_text()))


def _python_of(root: Path) -> tuple[str, Path]:
    """The guest's Python version ("3.11") and the folder where its added packages go."""
    for guest, folder in _PYTHONS.items():
        link = beneath(root, guest)
        if link.is_file() and (found := re.search(r"(3\.\d+)$", link.name)):
            return found[1], beneath(root, f"/usr/local/lib/python{found[1]}/{folder}")
    raise BadField("packages.pip", "the root filesystem has no python3 of a known version to install for")


def _install_wheels(root: Path, recipe: Recipe, stage: Path, progress: Progress) -> None:
    if not recipe.pip:
        return
    if importlib.util.find_spec("pip") is None:
        raise Unsupported(f"{sys.executable} has no pip", hint=f"{sys.executable} -m ensurepip")
    version, target = _python_of(root)
    # Not straight into the tree: pip would follow a symlink that it holds.
    wheels = stage / "wheels"
    argv = [sys.executable, "-m", "pip", "install", "--target", str(wheels), "--no-compile"]
    argv += ["--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    argv += [word for tag in _WHEEL_TAGS for word in ("--platform", f"{tag}_x86_64")]
    argv += ["--progress-bar", "off", "--root-user-action", "ignore", "--", *recipe.pip]
    tools.run(argv, progress)
    target.mkdir(parents=True, exist_ok=True)
    for item in wheels.iterdir():
        if item.name != "bin":  # its scripts name the host's interpreter
            _discard(target / item.name)
            item.rename(target / item.name)


def _install_files(root: Path, recipe: Recipe) -> None:
    for guest, path in recipe.files.items():
        target = beneath(root, guest)
        if target.is_dir():
            raise BadField(f"files.{guest}", "is a folder in the root filesystem")
        target.parent.mkdir(parents=True, exist_ok=True)
        _discard(target)
        shutil.copyfile(path, target)
        target.chmod(stat.S_IMODE(path.stat().st_mode))


def _finish(root: Path) -> None:
    if not any(beneath(root, guest).is_file() for guest in _PYTHONS):
        raise BadField(
            "packages.debian",
            "the root filesystem has no python3, which the agent runs on",
            hint='add "python3" to packages.debian, or to the tar or folder of [source] rootfs',
        )
    for name in _MOUNT_POINTS:
        path = root / name
        if path.is_symlink() or not path.is_dir():
            _discard(path)
            path.mkdir()
    _write_guest_file(root, "/etc/hostname", "forkd\n")
    _write_guest_file(root, "/etc/machine-id", "")  # each child gets one of its own when it wakes
    if not beneath(root, "/etc/hosts").exists():
        _write_guest_file(root, "/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")


def _write_guest_file(root: Path, guest: str, text: str) -> None:
    path = beneath(root, guest)
    path.parent.mkdir(parents=True, exist_ok=True)
    _discard(path)
    path.write_text(text)
    path.chmod(0o644)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
