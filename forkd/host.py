"""What `forkd doctor` says about this host: what works, what does not, and what to do about it."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forkd.config import Config
from forkd.engines.base import Check, Engine
from forkd.linux import process
from forkd.models import Image

_BUILD_TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "depmod": "kmod",
    "busybox": "busybox-static",
}


def report(config: Config, engine: Engine, images: list[Image]) -> dict[str, Any]:
    checks = [
        _platform(),
        *engine.probe(images[0] if images else None),
        _build_tools(),
        _memory(),
        _space(config),
        _images(images),
    ]
    kvm = next((c for c in checks if c.name == "kvm"), None)
    if any(c.level == "fail" for c in checks):
        verdict = "forkd cannot run microVMs here yet: see the failed lines"
    elif kvm is not None and kvm.level == "pass":
        verdict = "microVMs run under KVM at full speed"
    elif config.allow_tcg:
        verdict = "microVMs run here under emulation (tcg), 10 to 20 times slower than KVM"
    else:
        verdict = "microVMs run here only under emulation, and only when you ask for it: --accel tcg"
    return {"verdict": verdict, "checks": [asdict(check) for check in checks]}


def _platform() -> Check:
    about = os.uname()
    if about.machine != "x86_64":
        return Check(
            "platform", "fail", f"{about.sysname} {about.machine}", "forkd's microVMs need x86-64 Linux"
        )
    return Check("platform", "pass", f"Linux {about.release} {about.machine}, {os.cpu_count()} cores")


def _build_tools() -> Check:
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    missing = [package for tool, package in _BUILD_TOOLS.items() if not shutil.which(tool, path=path)]
    if missing:
        hint = f"apt-get install -y {' '.join(missing)}"
        return Check(
            "image tools", "warn", f"missing: {', '.join(missing)} (only `image build` needs them)", hint
        )
    return Check("image tools", "pass", "mmdebstrap, e2fsprogs, kmod, busybox")


def _memory() -> Check:
    free = process.available_mib()
    return Check("memory", "pass" if free >= 1024 else "warn", f"{free} MiB available")


def _space(config: Config) -> Check:
    folder = config.data_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free >> 30
    level = "pass" if free >= 5 else "warn" if free >= 1 else "fail"
    return Check("disk", level, f"{free} GiB free at {Path(folder)}")


def _images(images: list[Image]) -> Check:
    if not images:
        return Check("images", "warn", "none built yet", "forkd image build python-numpy")
    return Check("images", "pass", ", ".join(sorted({image.name for image in images})))
