"""Builds that meet another build, a signal, or sudden death: real processes, held at a gate inside mke2fs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forkd.errors import InUse
from forkd.images import Recipe, build, list_images, remove_image
from forkd.images.cache import Cache
from forkd.images.tools import Silent
from forkd.models import Image


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3").write_text("not really\n")
    return root


@pytest.fixture
def recipe(source: Path) -> Recipe:
    return Recipe(name="small", source=source, disk_mib=8)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "vmlinux"
    path.write_bytes(b"\x7fELF" + b"\0" * 1024)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "images"


def staged(images: Path) -> list[Path]:
    return list((images / ".cache/staging").iterdir())


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put before mke2fs a program that counts its runs, says "at the gate" and waits for a writer."""
    real = shutil.which("mke2fs", path="/usr/sbin:/sbin")
    folder = tmp_path / "bin"
    folder.mkdir()
    os.mkfifo(tmp_path / "gate")
    script = (
        f'echo run >>{tmp_path}/runs\necho at the gate\ncat {tmp_path}/gate >/dev/null\nexec {real} "$@"\n'
    )
    (folder / "mke2fs").write_text(f"#!/bin/sh\n{script}")
    (folder / "mke2fs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "gate"


class Watch(Silent):
    """Sets an event when a line with this text comes by."""

    def __init__(self, text: str) -> None:
        self.text, self.seen = text, threading.Event()

    def line(self, text: str) -> None:
        if self.text in text:
            self.seen.set()


def test_of_two_builds_at_once_one_builds_and_one_waits(
    recipe: Recipe, kernel: Path, images: Path, gate: Path
) -> None:
    made: list[Image] = []

    def start(watch: Watch) -> threading.Thread:
        options: dict[str, Any] = {"kernel": kernel, "progress": watch}
        thread = threading.Thread(target=lambda: made.append(build(recipe, images, **options)))
        thread.start()
        assert watch.seen.wait(60)
        return thread

    threads = [start(Watch("at the gate")), start(Watch("waiting for another build"))]
    with pytest.raises(InUse, match="being built"):
        (images / "small").mkdir(exist_ok=True)
        remove_image(images, "small")
    gate.write_text("go")
    for thread in threads:
        thread.join(60)
    assert made[0] == made[1]
    assert (gate.parent / "runs").read_text() == "run\n"


PROGRAM = """
import sys
from pathlib import Path
from forkd.images import Recipe, build

class Show:
    def stage(self, name): pass
    def line(self, text): print(text, flush=True)

source, images, kernel = map(Path, sys.argv[1:])
build(Recipe(name="small", source=source, disk_mib=8), images, kernel=kernel, progress=Show())
"""


def interrupted(how: signal.Signals, source: Path, images: Path, kernel: Path) -> int:
    argv = [sys.executable, "-c", PROGRAM, str(source), str(images), str(kernel)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert any("at the gate" in line for line in process.stdout)
        process.send_signal(how)
        return process.wait(60)


def running(path: Path) -> bool:
    """Does any process have this path among its arguments?"""
    wanted = str(path).encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in entry.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def gone(path: Path) -> bool:
    deadline = time.monotonic() + 30
    while running(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(path)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing(
    source: Path, images: Path, kernel: Path, gate: Path, how: signal.Signals
) -> None:
    assert interrupted(how, source, images, kernel) != 0
    assert not running(gate)
    assert staged(images) == []
    assert list_images(images) == []


def test_what_a_killed_build_left_is_swept_by_the_next(
    recipe: Recipe, source: Path, images: Path, kernel: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interrupted(signal.SIGKILL, source, images, kernel) == -signal.SIGKILL
    assert gone(gate)  # the programs it ran die with it
    assert len(staged(images)) == 1
    cache = Cache(images)
    with cache.opened(), cache.stage() as alive, cache.opened():
        assert staged(images) == [alive]  # the dead one's is gone, a living one's stays
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    assert build(recipe, images, kernel=kernel).rootfs.exists()
    assert staged(images) == []
