"""The programs a build runs: finding them, running them, and leaving none behind.

Nothing here goes through a shell. Every program runs where its death follows
the builder's: a parent-death signal, and for root a pid and mount namespace of
its own, so that neither a process nor a mount outlives a killed build.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from forkd.errors import EngineFailed, NoSpace, Unsupported

log = logging.getLogger(__name__)

PACKAGES = {
    "apt-cache": "apt",
    "apt-config": "apt",
    "apt-get": "apt",
    "busybox": "busybox-static",
    "cp": "coreutils",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "tar": "tar",
    "unshare": "util-linux",
    "zstd": "zstd",
}
_TAIL_LINES = 12


class Progress(Protocol):
    """Told what a build does. `stage` opens a step, `line` is output of the program running in it."""

    def stage(self, name: str) -> None: ...

    def line(self, text: str) -> None: ...


class Silent:
    def stage(self, name: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


def _search_path() -> str:
    """PATH with the sbin folders, which an ordinary user's PATH lacks on Debian."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def need(*names: str) -> None:
    """Raise one Unsupported that names every missing program and the one command that installs them."""
    missing = [name for name in names if shutil.which(name, path=_search_path()) is None]
    if missing:
        packages = sorted({PACKAGES[name] for name in missing})
        raise Unsupported(
            f"building an image needs {', '.join(missing)}, which this host does not have",
            hint=f"apt-get install -y {' '.join(packages)}",
        )


def find(name: str) -> Path:
    need(name)
    return Path(str(shutil.which(name, path=_search_path())))


def run(
    argv: Sequence[str | Path],
    progress: Progress,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run to the end, passing each line of output on; a failure carries the last lines."""
    words = [str(word) for word in argv]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        [*_contained(), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(env or {}),
        cwd=cwd,
        umask=0o022,
        process_group=0,  # a terminal's Ctrl-C reaches the builder alone, which then ends the program
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            for line in process.stdout:
                if text := line.strip():
                    tail.append(text)
                    progress.line(text)
            code = process.wait()
        except BaseException:
            _kill(process)
            raise
    if code != 0:
        _fail(words, code, list(tail))


def ask(argv: Sequence[str | Path]) -> str:
    """The standard output of a short query; empty if the program does not know the answer."""
    words = [str(word) for word in argv]
    found = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, env=_environment({}), check=False
    )
    return found.stdout.decode(errors="replace") if found.returncode == 0 else ""


def _contained() -> list[str]:
    words = [str(find("setpriv")), "--pdeathsig", "KILL"]
    if os.geteuid() == 0:
        words += [str(find("unshare")), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return words


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    fixed = {"PATH": _search_path(), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    return {**os.environ, **fixed, **extra}


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    # Descendants die asynchronously with their namespace. All hold the pipe, so its end means that
    # the last one is gone and nothing writes into the staging folder any more.
    assert process.stdout is not None
    while process.stdout.read(65536):
        pass


def _fail(words: list[str], code: int, tail: list[str]) -> None:
    name = Path(words[0]).name
    log.error("failed with status %d: %s", code, shlex.join(words))
    said = "; ".join(tail[-4:]) or "it printed nothing"
    if any("No space left on device" in line for line in tail):
        raise NoSpace(f"{name} ran out of disk space", hint="free some space where the images are kept")
    raise EngineFailed(name, f"ended with status {code}: {said}")
