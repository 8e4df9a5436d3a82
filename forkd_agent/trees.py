"""Killing everything a command started, however it tried to get away.

With cgroup v2 the kernel keeps the list. Without it, /proc is searched for the
command's session, its descendants and a mark in the environment, which also finds
what has daemonised itself.
"""

from __future__ import annotations

import os
import signal

MARK = "FORKD_EXEC"
_ROUNDS = 50  # a tree that forks while it is being killed gets this many passes


class Tree:
    """What one command started, found through /proc."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.pid = 0

    def environ(self) -> dict[str, str]:
        return {MARK: self._mark}

    def __enter__(self) -> Tree:
        """The command is started inside this block."""
        return self

    def __exit__(self, *exc: object) -> None: ...

    def kill(self) -> None:
        killed: set[int] = set()
        for _ in range(_ROUNDS):
            found = self._members()
            if found <= killed:
                return
            # The command first, then the rest by age: a shell that outlives its child would report that child's
            # death as its own result, or go on to its next line.
            for pid in sorted(found, key=lambda pid: (pid != self.pid, pid)):
                _kill(pid)
            killed |= found

    def release(self) -> None:
        """The command itself has ended; what it left running stays."""

    def _members(self) -> set[int]:
        mark = f"{MARK}={self._mark}\0".encode()
        parents: dict[int, int] = {}
        members: set[int] = set()
        for pid in _pids():
            stat = _stat(pid)
            if stat is None:
                continue
            state, parent, group, session = stat
            if state in "ZX":
                continue
            parents[pid] = parent
            if self.pid in (pid, group, session) or mark in _environ(pid):
                members.add(pid)
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in members} - members
            members |= more
            grown = bool(more)
        return members


class CgroupTree(Tree):
    """What one command started, listed by the kernel."""

    def __init__(self, cgroups: Cgroups, path: str) -> None:
        super().__init__("")
        self._cgroups = cgroups
        self._path = path

    def environ(self) -> dict[str, str]:
        return {}

    def __enter__(self) -> Tree:
        # The agent goes in, starts the command and comes out: the command is born inside. Code between fork
        # and exec could do the same, but rules out vfork, and a full fork of the agent costs ten times that.
        _join(self._path)
        return self

    def __exit__(self, *exc: object) -> None:
        _join(self._cgroups.home)

    def kill(self) -> None:
        try:
            _write(f"{self._path}/cgroup.kill", "1")
        except FileNotFoundError:  # before Linux 5.14
            self._kill_listed()

    def release(self) -> None:
        self._cgroups.remove(self._path)

    def _kill_listed(self) -> None:
        for _ in range(_ROUNDS):
            with open(f"{self._path}/cgroup.procs") as f:
                pids = [int(line) for line in f]
            if not pids:
                return
            for pid in pids:
                _kill(pid)


class Cgroups:
    """The folder under which each command gets a cgroup; the agent lives in the folder itself."""

    def __init__(self, home: str) -> None:
        self.home = home
        self._made = 0
        self._left: list[str] = []  # still inhabited when their command ended
        _join(home)

    def make(self) -> CgroupTree:
        self._made += 1
        path = f"{self.home}/exec-{self._made}"
        os.mkdir(path)
        return CgroupTree(self, path)

    def remove(self, path: str) -> None:
        self._left.append(path)
        # The newest is most often empty already; of the older ones a few at a time keeps this cheap.
        for old in [path, *self._left[:4]]:
            if old in self._left:
                self._left.remove(old)
                if not _rmdir(old):
                    self._left.append(old)


class Trees:
    """Makes a Tree for each command, of the best kind this system has."""

    def __init__(self, cgroup_home: str | None) -> None:
        self._cgroups = Cgroups(cgroup_home) if cgroup_home else None

    def make(self) -> Tree:
        return self._cgroups.make() if self._cgroups else Tree(os.urandom(16).hex())


def _join(cgroup: str) -> None:
    _write(f"{cgroup}/cgroup.procs", "0")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The name stands in parentheses and may hold any byte, so the last one is what counts.
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3])


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return f.read() + b"\0"
    except OSError:
        return b""
