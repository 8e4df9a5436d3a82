"""The guest kernel's side of the agent: entropy, clock, identity, the host port, the last reset.

The only module that knows ioctl numbers and /proc, /sys and /etc paths that are written to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

RNDADDENTROPY = 0x40085203  # _IOW('R', 3, int[2])
RNDRESEEDCRNG = 0x5207  # _IO('R', 7)

PORT_NAME = "forkd.agent"
PORTS = "/sys/class/virtio-ports"
BOOT_ID = "/run/forkd/boot_id"  # bind-mounted over /proc/sys/kernel/random/boot_id


class StepFailed(Exception):
    """One named step of waking failed."""


def add_entropy(seed: bytes) -> None:
    """Credit `seed` to the kernel's pool and have its generator take it up now.

    Without the second call the generator would go on from the captured key, the same in
    every child, until its next periodic reseed.
    """
    fd = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(fd, RNDRESEEDCRNG)
    finally:
        os.close(fd)


def set_clock(realtime_ns: int) -> None:
    time.clock_settime_ns(time.CLOCK_REALTIME, realtime_ns)


def set_hostname(name: str) -> None:
    overwrite("/proc/sys/kernel/hostname", name)
    overwrite("/etc/hostname", name + "\n")


def set_machine_id(machine_id: str) -> None:
    overwrite("/etc/machine-id", machine_id + "\n")


def set_boot_id(boot_id: str) -> None:
    overwrite(BOOT_ID, boot_id + "\n")


def overwrite(path: str, text: str) -> None:
    """Replace a small file's content in place: bind mounts follow the inode.

    No O_TRUNC: ext4 answers truncate-to-zero plus close with a flush to the disk, which waking cannot afford.
    """
    data = text.encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
        if not path.startswith("/proc/"):
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def find_port(deadline_s: float = 30.0) -> str:
    """The device of the host's port. There is no udev, so no /dev/virtio-ports to look in."""
    end = time.monotonic() + deadline_s
    while True:
        for device in _listdir(PORTS):
            if _text(f"{PORTS}/{device}/name") == PORT_NAME:
                return f"/dev/{device}"
        if time.monotonic() > end:
            raise OSError(errno.ENODEV, f"no virtio-serial port named {PORT_NAME}; is virtio_console loaded?")
        time.sleep(0.01)  # the driver announces ports from a work queue and has nothing to wait on


def name_process(name: str) -> None:
    """Shown by ps and matched by pkill, so that `pkill python3` spares the agent."""
    overwrite("/proc/self/comm", name)


def shield_from_oom(pid: int, *, shielded: bool) -> None:
    """A memory hog should cost a user's process, not the agent. Children inherit it, so expose them again."""
    overwrite(f"/proc/{pid}/oom_score_adj", "-999" if shielded else "0")


def reset_machine() -> None:
    """Reset at once, without syncing: with -no-reboot the machine monitor exits."""
    overwrite("/proc/sys/kernel/sysrq", "1")
    overwrite("/proc/sysrq-trigger", "b")


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return ""
