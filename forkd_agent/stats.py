"""How the guest is doing: time up, load, memory, disk, processes. Reads /proc, keeps nothing."""

from __future__ import annotations

import os
from typing import Any


def collect() -> dict[str, Any]:
    memory = _meminfo()
    disk = os.statvfs("/")
    return {
        "uptime_s": float(_words("/proc/uptime")[0]),
        "load1": float(_words("/proc/loadavg")[0]),
        "mem_total_kib": memory["MemTotal"],
        "mem_available_kib": memory["MemAvailable"],
        "disk_total_bytes": disk.f_blocks * disk.f_frsize,
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    }


def _words(path: str) -> list[str]:
    with open(path) as f:
        return f.read().split()


def _meminfo() -> dict[str, int]:
    wanted = {}
    with open("/proc/meminfo") as f:
        for line in f:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                wanted[name] = int(rest.split()[0])
    return wanted
