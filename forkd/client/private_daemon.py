"""Finds this user's daemon, or starts a private one, so that nobody needs a second terminal.

Owns the start and the wait for it; the daemon lives on by itself and leaves when idle.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from forkd.client.controller import Controller
from forkd.client.failures import ConnectionFailed, ControllerError, DaemonUnavailable
from forkd.config import default_data_dir

START_SECS = 30.0
IDLE_EXIT_SECS = 600
_POLL_SECS = 0.05
_PROBE_SECS = 5.0
_TAIL_BYTES = 2000


def ensure_daemon(data_dir: Path | None = None) -> str:
    """The base URL of a daemon that answers: $FORKD_URL, else the one of `data_dir`, started if need be."""
    if url := os.environ.get("FORKD_URL"):
        return url
    folder = (data_dir or default_data_dir()).absolute()
    if url := find_daemon(folder):
        return url
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _starting(folder):
            # Whoever held the lock before us has most likely just started it.
            return find_daemon(folder) or _start(folder)
    except OSError as e:
        if isinstance(e, ConnectionFailed):
            raise
        problem = f"cannot use the data folder {folder}: {e.strerror}"
        raise DaemonUnavailable(socket_url(folder), problem, hint="choose one with FORKD_DATA_DIR") from e


def find_daemon(data_dir: Path) -> str | None:
    """The URL of the daemon on this data folder, if one answers."""
    url = socket_url(data_dir)
    try:
        with Controller(url, token="", timeout=_PROBE_SECS) as controller:
            controller.healthz()
    except (ConnectionFailed, ControllerError):
        return None
    return url


def socket_url(data_dir: Path) -> str:
    return f"unix://{quote(str(data_dir / 'forkd.sock'))}"


@contextlib.contextmanager
def _starting(folder: Path) -> Iterator[None]:
    fd = os.open(folder / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(folder: Path) -> str:
    if find_spec("uvicorn") is None:
        raise DaemonUnavailable(
            socket_url(folder),
            "no daemon runs here, and this installation holds only the client",
            hint="pip install 'forkd[host]', or point FORKD_URL at a daemon",
        )
    log = folder / "daemon.log"
    before = log.stat().st_size if log.exists() else 0
    process = _launch(folder, log)
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline:
        if url := find_daemon(folder):
            # Reaped when it leaves, so that a long-lived client does not collect a zombie.
            threading.Thread(target=process.wait, name="forkd-daemon-reaper", daemon=True).start()
            return url
        # A daemon that left because another one holds the folder: that one may still be recovering.
        if process.poll() is not None and not _held(folder / "lock"):
            raise _unavailable(folder, log, before, f"the daemon left with code {process.returncode}")
        time.sleep(_POLL_SECS)
    process.kill()  # it never got as far as having anything to tear down
    process.wait()
    raise _unavailable(folder, log, before, f"the daemon did not answer within {START_SECS:.0f} s")


def _launch(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    # -P: with the root as working folder, nothing lying there may be imported.
    command = [sys.executable, "-P", "-m", "forkd.daemon.main", "serve"]
    command += ["--data-dir", str(folder), "--bind", "", "--idle-exit-secs", str(IDLE_EXIT_SECS)]
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, cwd="/", start_new_session=True
        )
    finally:
        os.close(fd)


def _held(lock: Path) -> bool:
    """Whether a process, here a daemon, holds this lock file."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _unavailable(folder: Path, log: Path, before: int, problem: str) -> DaemonUnavailable:
    said = log.read_bytes()[before:][-_TAIL_BYTES:].decode(errors="replace").strip()
    said = f"{log} ends with:\n{said}\n" if said else f"it wrote nothing to {log}"
    hint = "`forkd-controller serve` shows it live"
    return DaemonUnavailable(socket_url(folder), f"{problem}; {said}", hint=hint)
