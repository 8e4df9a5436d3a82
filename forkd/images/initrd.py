"""The initrd: busybox, `init.sh`, kernel modules and the in-guest agent, as one small archive.

The agent travels here rather than in the root filesystem, so that a new agent costs no new root filesystem.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import forkd_agent
from forkd.errors import Unsupported
from forkd.images import cpio, tools
from forkd.images.files import digest_values

_INIT = Path(__file__).with_name("init.sh")
_APPLETS = ["cat", "cp", "insmod", "ip", "ln", "mkdir", "mount", "reboot", "sh", "switch_root", "usleep"]
_FOLDERS = ["bin", "dev", "proc", "sys", "newroot", "modules", "forkd", "forkd/forkd_agent"]
_PT_INTERP = 3


def content_key() -> str:
    """Changes with `init.sh` and with any source file of the agent."""
    sources = {name: data.hex() for name, data in _agent_sources().items()}
    return digest_values({"init": _INIT.read_text(), "agent": sources, "applets": _APPLETS})


def write_initrd(target: Path, modules: list[Path]) -> None:
    """`modules` are loaded in the order of their names."""
    entries = [cpio.folder(name) for name in _FOLDERS]
    # The kernel opens the console before /init could mount a /dev.
    entries.append(cpio.character("dev/console", 5, 1))
    entries.append(cpio.regular("init", _INIT.read_bytes(), 0o755))
    entries.append(cpio.regular("bin/busybox", static_busybox().read_bytes(), 0o755))
    entries += [cpio.symlink(f"bin/{name}", "busybox") for name in _APPLETS]
    entries += [cpio.regular(f"modules/{path.name}", path.read_bytes()) for path in modules]
    for name, data in _agent_sources().items():
        folder = name.rpartition("/")[0]
        if folder and (made := cpio.folder(f"forkd/forkd_agent/{folder}")) not in entries:
            entries.append(made)
        entries.append(cpio.regular(f"forkd/forkd_agent/{name}", data))
    # Level 6 and no time stamp: small enough to unpack fast under emulation, equal for equal content.
    target.write_bytes(gzip.compress(cpio.archive(entries), 6, mtime=0))


def static_busybox() -> Path:
    found = tools.find("busybox")
    if _needs_loader(found):
        raise Unsupported(
            f"{found} is linked dynamically and cannot run in an initrd",
            hint="apt-get install -y busybox-static",
        )
    return found


def _agent_sources() -> dict[str, bytes]:
    assert forkd_agent.__file__ is not None
    package = Path(forkd_agent.__file__).parent
    return {str(path.relative_to(package)): path.read_bytes() for path in sorted(package.rglob("*.py"))}


def _needs_loader(path: Path) -> bool:
    """Does this 64-bit ELF file name a dynamic loader?"""
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return True
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    kinds = [struct.unpack_from("<I", data, offset + size * n)[0] for n in range(count)]
    return _PT_INTERP in kinds
