"""The microvm engine: boot a parent, capture it, restore children from one memory file.

RAM is a file that the parent maps shared and every child maps privately, so
copy-on-write is the kernel's own. Device state is saved without RAM and loaded
from an inherited descriptor. Disks are qcow2 overlays on one immutable base.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from forkd.engines.base import Captured, Check, Handle, Slot
from forkd.engines.microvm import kvm, vmm
from forkd.engines.microvm.qmp import Qmp
from forkd.errors import EngineFailed, Unsupported
from forkd.linux import cgroup, process, sockets
from forkd.models import Accel, EngineName, Image, Machine, Snapshot

_VMM_SHARE_MIB = 64  # what the VMM itself may use on top of a sandbox's memory limit


class MicrovmEngine:
    name = EngineName.MICROVM

    def __init__(
        self, *, state_dir: Path, data_dir: Path, qemu: str = "", accel: Accel, allow_tcg: bool
    ) -> None:
        self._verdict_file = state_dir / "kvm.json"
        self._qemu = qemu
        self._default = accel
        self._allow_tcg = allow_tcg
        self._groups = cgroup.MemoryGroups.for_data_dir(data_dir)

    # -- what this host can do

    def probe(self, image: Image | None) -> list[Check]:
        try:
            found = vmm.find(Accel.TCG, self._qemu)
            qemu = Check("qemu", "pass", f"{found.version} at {found.binary}")
        except Unsupported as e:
            qemu = Check("qemu", "fail", str(e), e.hint or "")
        verdict = kvm.verdict(self._verdict_file, image, self._qemu)
        if verdict is None:
            return [
                qemu,
                Check(
                    "kvm",
                    "warn",
                    "not proved yet: that takes a built image",
                    "forkd image build python-numpy",
                ),
            ]
        if verdict.usable:
            return [qemu, Check("kvm", "pass", verdict.reason)]
        allowed = "; emulation (tcg) is allowed by the settings" if self._allow_tcg else ""
        hint = "microVMs still run under emulation, 10 to 20 times slower: --accel tcg, or allow_tcg = true"
        return [qemu, Check("kvm", "warn", verdict.reason + allowed, "" if self._allow_tcg else hint)]

    def choose_accel(self, wanted: Accel, image: Image) -> Accel:
        wanted = self._default if wanted is Accel.AUTO else wanted
        if wanted is Accel.TCG:
            return Accel.TCG
        verdict = kvm.verdict(self._verdict_file, image, self._qemu)
        assert verdict is not None  # there is an image
        if verdict.usable:
            return Accel.KVM
        if wanted is Accel.AUTO and self._allow_tcg:
            return Accel.TCG
        raise Unsupported(
            f"KVM does not work on this host: {verdict.reason}",
            hint="ask for emulation with accel=tcg (10 to 20 times slower), or start the daemon with --allow-tcg",
        )

    # -- the parent

    def warm(self, image: Image, machine: Machine, accel: Accel, staging: Path, slot: Slot) -> Handle:
        memory, disk = staging / "memory.bin", staging / "disk.qcow2"
        with memory.open("xb") as f:
            f.truncate(machine.memory_mib << 20)
        make_overlay(disk, image.rootfs)
        found = vmm.find(accel, self._qemu)
        return self._launch(
            slot, lambda fds: vmm.boot(found, accel, image, machine, memory, disk, fds, marker(slot)), ()
        )

    def capture(self, handle: Handle, staging: Path) -> Captured:
        with Qmp(handle.slot.dir / "qmp.sock") as monitor:
            about = monitor.execute("query-version")["qemu"]
            monitor.execute("stop")
            # Saves every device and no RAM; works without Xen despite its name.
            monitor.execute("xen-save-devices-state", filename=str(staging / "vmstate"))
        self.stop(handle)
        version = ".".join(str(about[part]) for part in ("major", "minor", "micro"))
        return Captured(("memory.bin", "vmstate", "disk.qcow2"), f"QEMU {version}")

    # -- children

    def prepare(self, snapshot: Snapshot, slot: Slot) -> Handle:
        disk = slot.dir / "disk.qcow2"
        shutil.copyfile(snapshot.dir / "overlay.qcow2", disk)
        layers = [disk, snapshot.disk, snapshot.rootfs]
        found = vmm.find(snapshot.accel, self._qemu)
        state = os.open(snapshot.vmstate, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._launch(
                slot,
                lambda fds: vmm.restore(
                    found, snapshot.accel, snapshot.machine, snapshot.memory, layers, fds, state, marker(slot)
                ),
                (state,),
            )
        finally:
            os.close(state)

    def resume(self, handle: Handle) -> None:
        try:
            with Qmp(handle.slot.dir / "qmp.sock") as monitor:
                # While the state is still loading, `cont` is remembered and carried out when it is loaded.
                monitor.execute("cont")
                monitor.wait_event("RESUME")
        except EngineFailed as e:
            raise EngineFailed("restore", f"{e}; the VMM said: {self._last_words(handle.slot)}") from e

    def stop(self, handle: Handle) -> None:
        self.sweep(handle.slot, pid=handle.pid)

    def adopt(self, slot: Slot, pid: int | None) -> Handle | None:
        if pid is None or marker(slot) not in process.command_line(pid):
            return None
        return Handle(slot, pid)

    def sweep(self, slot: Slot, *, pid: int | None = None) -> None:
        for found in [pid] if pid is not None else list(process.carrying(marker(slot))):
            process.kill(found, marker(slot))
            process.reap(found)
        leaf = self._groups.parent / slot.id
        if leaf.exists():
            self._groups.remove(leaf)
            self._groups.close()

    def died_of(self, slot: Slot) -> str:
        if self._groups.oom_killed(self._groups.parent / slot.id):
            return "oom: it used more memory than its limit"
        words = self._last_words(slot)
        return f"the VMM ended: {words}" if words else "the VMM ended (killed, or the guest shut down)"

    # -- the process

    def _launch(self, slot: Slot, command: object, keep: tuple[int, ...]) -> Handle:
        """Start the VMM with its two listening sockets already there, so that nobody waits for them to appear."""
        assert callable(command)
        leaf = None
        if slot.memory_limit_mib is not None:
            leaf = self._groups.create(slot.id, slot.memory_limit_mib + _VMM_SHARE_MIB)
        with contextlib.ExitStack() as stack:
            qmp = stack.enter_context(sockets.listen(slot.dir / "qmp.sock"))
            agent = stack.enter_context(sockets.listen(slot.agent_socket))
            log = stack.enter_context(slot.log.open("ab"))
            argv: list[str] = command((qmp.fileno(), agent.fileno()))
            vm = subprocess.Popen(
                argv,
                cwd=slot.dir,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(qmp.fileno(), agent.fileno(), *keep),
                start_new_session=True,
            )
            if leaf is not None:
                cgroup.add(leaf, vm.pid)
        # From here on the pid is watched and reaped by the runtime; Popen must not warn about it.
        vm.returncode = -signal.SIGKILL
        return Handle(slot, vm.pid)

    def _last_words(self, slot: Slot) -> str:
        with contextlib.suppress(OSError):
            return slot.log.read_bytes()[-500:].decode(errors="replace").strip()
        return ""


def marker(slot: Slot) -> str:
    """The one argument by which a VMM is known to be this sandbox's."""
    return f"forkd-{slot.id}"


def make_overlay(path: Path, backing: Path) -> None:
    """An empty qcow2 as large as its backing disk; which disk that is, the command line says."""
    size = backing.stat().st_size
    command = ["qemu-img", "create", "-q", "-f", "qcow2", str(path), str(size)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as e:
        raise Unsupported("qemu-img is not installed", hint="apt-get install -y qemu-utils") from e
    except subprocess.SubprocessError as e:
        raise EngineFailed("make a disk overlay", str(e)) from e
