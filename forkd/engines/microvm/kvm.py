"""Does KVM really work here? Proved by booting the real guest kernel, once per boot of the host.

A /dev/kvm that opens proves little: on some virtual machines it creates guests
whose kernel never gets through early boot and burns a core. So the verdict is a
boot to the guest's first program within a deadline, kept until the next boot.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from forkd.engines.microvm import vmm
from forkd.errors import Unsupported
from forkd.linux import process
from forkd.models import Accel, Image

_PROOF = b"FORKD-PROBE-OK"


@dataclass(frozen=True, slots=True)
class Verdict:
    usable: bool
    reason: str
    boot_id: str


def verdict(cache: Path, image: Image | None, qemu: str = "") -> Verdict | None:
    """The cached or fresh verdict; None if a boot is needed and there is no image to boot."""
    boot = process.boot_id()
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Verdict(False, "/dev/kvm is missing or not open to this user", boot)
    try:
        known = Verdict(**json.loads(cache.read_text()))
        if known.boot_id == boot:
            return known
    except (OSError, ValueError, TypeError):
        pass  # absent, or not ours: prove it anew
    if image is None:
        return None
    usable, reason = _boots(image, qemu)
    found = Verdict(usable, reason, boot)
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(found)))
    partial.replace(cache)
    return found


def _boots(image: Image, qemu: str) -> tuple[bool, str]:
    seconds = float(os.environ.get("FORKD_KVM_PROBE_SECS", "10"))
    try:
        command = vmm.probe_boot(vmm.find(Accel.KVM, qemu), Accel.KVM, image)
    except Unsupported as e:
        return False, str(e)
    started = time.monotonic()
    guest = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert guest.stdout is not None
    seen = b""
    try:
        while (left := started + seconds - time.monotonic()) > 0:
            if not select.select([guest.stdout], [], [], left)[0]:
                break
            data = os.read(guest.stdout.fileno(), 65536)
            seen = (seen + data)[-65536:]
            if _PROOF in seen:
                return True, f"a guest kernel booted under KVM in {time.monotonic() - started:.1f} s"
            if not data:
                return False, f"the VMM gave up: {seen.decode(errors='replace').strip()[-300:]}"
    finally:
        guest.kill()
        guest.wait()
        guest.stdout.close()
    heard = (
        "printed nothing" if not seen else f"got as far as: {seen.decode(errors='replace').strip()[-120:]}"
    )
    return False, f"/dev/kvm opens, but a guest kernel did not boot within {seconds:.0f} s ({heard})"
