"""QEMU's command line, and which of it this host's QEMU understands.

Versions are probed by asking the binary what it offers, never by its number.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import Unsupported
from forkd.models import Accel, Image, Machine

INSTALL_HINT = "install it: apt-get install -y qemu-system-x86"
_CONSOLE = "console=ttyS0 reboot=t panic=-1 quiet random.trust_cpu=on"


@dataclass(frozen=True, slots=True)
class Vmm:
    binary: str
    version: str
    private_readonly_ram: bool  # can map a file privately that it may only read


@functools.cache
def find(accel: Accel, chosen: str = "") -> Vmm:
    """The best binary for `accel`: with KVM the small build starts three times faster."""
    names = [chosen] if chosen else ["qemu-system-x86_64"]
    if not chosen and accel is Accel.KVM:
        names.insert(0, "qemu-system-x86_64-microvm")
    for name in names:
        if path := shutil.which(name):
            return Vmm(path, _ask(path, "--version").split("\n")[0], _offers_rom(path))
    raise Unsupported(f"QEMU is not installed ({', '.join(names)} not found)", hint=INSTALL_HINT)


def _offers_rom(binary: str) -> bool:
    return "  rom=" in _ask(binary, "-object", "memory-backend-file,help")


def _ask(binary: str, *args: str) -> str:
    done = subprocess.run([binary, *args], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout


def _common(vmm: Vmm, accel: Accel, machine: Machine, marker: str) -> list[str]:
    speed = "kvm" if accel is Accel.KVM else "tcg,thread=multi,tb-size=32"
    return [
        vmm.binary,
        *("-name", marker),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        *("-machine", "microvm,memory-backend=ram,suppress-vmdesc=on"),
        *("-accel", speed),
        *("-cpu", "host" if accel is Accel.KVM else "max"),
        *("-smp", str(machine.vcpus)),
        *("-m", f"{machine.memory_mib}M"),
        *("-global", "migration.send-configuration=off"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,resourcecontrol=deny"),
    ]


def _ram(vmm: Vmm, path: Path, machine: Machine, *, shared: bool) -> list[str]:
    backend = f"memory-backend-file,id=ram,size={machine.memory_mib}M,mem-path={_quoted(path)}"
    backend += ",share=on" if shared else ",share=off"
    if not shared and vmm.private_readonly_ram:
        backend += ",readonly=on,rom=off"
    return ["-object", backend]


def _disk(layers: list[Path]) -> list[str]:
    """`layers` from the writable top down to the raw base. Only the top is ever written."""
    args: list[str] = []
    below = ""
    for depth, path in reversed(list(enumerate(layers))):
        top, raw = depth == 0, depth == len(layers) - 1
        read_only = "off" if top else "on"
        args += [
            "-blockdev",
            f"driver=file,node-name=f{depth},filename={_quoted(path)},read-only={read_only}",
        ]
        node = f"driver={'raw' if raw else 'qcow2'},node-name=d{depth},file=f{depth},read-only={read_only}"
        args += ["-blockdev", node + (f",backing={below}" if below else "")]
        below = f"d{depth}"
    return [*args, "-device", "virtio-blk-device,drive=d0"]


def _channels(qmp_fd: int, agent_fd: int) -> list[str]:
    return [
        *("-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=agent,fd={agent_fd},server=on,wait=off"),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=forkd.agent"),
        *("-device", "virtio-rng-device"),
    ]


def boot(
    vmm: Vmm,
    accel: Accel,
    image: Image,
    machine: Machine,
    memory: Path,
    disk: Path,
    fds: tuple[int, int],
    marker: str,
) -> list[str]:
    return [
        *_common(vmm, accel, machine, marker),
        *_ram(vmm, memory, machine, shared=True),
        *_disk([disk, image.rootfs]),
        *_channels(*fds),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", _CONSOLE),
        *("-serial", "file:console.log"),
    ]


def restore(
    vmm: Vmm,
    accel: Accel,
    machine: Machine,
    memory: Path,
    layers: list[Path],
    fds: tuple[int, int],
    state_fd: int,
    marker: str,
) -> list[str]:
    """No kernel arguments: they would cost each child 70 ms and 14 MiB for nothing."""
    return [
        *_common(vmm, accel, machine, marker),
        *_ram(vmm, memory, machine, shared=False),
        *_disk(layers),
        *_channels(*fds),
        *("-serial", "null"),
        *("-S", "-incoming", f"fd:{state_fd}"),
    ]


def probe_boot(vmm: Vmm, accel: Accel, image: Image) -> list[str]:
    """The real kernel, as far as its first program, and off again."""
    return [
        vmm.binary,
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-machine", "microvm", "-accel", accel.value),
        *("-cpu", "host" if accel is Accel.KVM else "max"),
        *("-m", "256M"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", f"{_CONSOLE} earlyprintk=ttyS0 forkd.probe"),
        *("-serial", "stdio"),
    ]


def _quoted(path: Path) -> str:
    return str(path).replace(",", ",,")
