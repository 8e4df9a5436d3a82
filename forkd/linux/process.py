"""Processes named so that a recycled pid is never mistaken for the old one.

A VMM carries its sandbox's 128-bit id on its command line; that, read through
/proc while a pidfd pins the process, is the identity every kill goes by.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def command_line(pid: int) -> list[str]:
    """The argument vector; empty for a zombie, a kernel thread or a process that is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def carrying(marker: str) -> Iterator[int]:
    """Every process with `marker` as one whole argument."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and marker in command_line(int(entry)):
            yield int(entry)


def kill(pid: int, marker: str, *, wait_secs: float = 5) -> bool:
    """SIGKILL `pid` if it still carries `marker`, and wait until it is gone. False: it is not that process."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if marker not in command_line(pid):  # checked after the pidfd pinned the process
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return gone_within(fd, wait_secs)
    finally:
        os.close(fd)


def gone_within(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def reap(pid: int) -> None:
    """Collect a dead child of ours; somebody else's child is not ours to collect."""
    with contextlib.suppress(ChildProcessError):
        deadline = time.monotonic() + 1
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.001)


def private_kib(pid: int) -> int:
    """Pages that nobody else maps: what this process alone costs."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1])
    return total


def available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0
