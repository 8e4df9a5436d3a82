"""The privileged half of waking, step by step, and the parts of it that can be tried on any machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkd_agent import hooks, kernel
from forkd_agent.evals import Wake
from forkd_agent.protocol import Frame
from forkd_agent.requests import Desk
from tests.framework.agent_client import WAKE

STEPS = ["add_entropy", "set_clock", "set_hostname", "set_machine_id", "set_boot_id"]
NAMES = ["entropy", "clock", "hostname", "machine-id", "boot-id"]


class Interpreter:
    """Stands where the warmed interpreter does and answers at once."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def call(self, op: str, frame: Frame, reply: Callable[[Frame], None]) -> int:
        self._log.append(op)
        reply({"ev": "end", "ok": True})
        return 1


class Heard:
    """Stands where the host's channel does."""

    full = False

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    for name in STEPS:
        monkeypatch.setattr(kernel, name, lambda *args, name=name: seen.append(name))
    return seen


def _wake(log: list[str]) -> tuple[Frame, str]:
    desk, heard = Desk(), Heard()
    problems: list[str] = []
    desk.attach(heard)  # type: ignore[arg-type]
    request = Wake(desk, {"id": 1, "op": "wake", **WAKE}, privileged=True)
    request.run(Interpreter(log), problems.append)  # type: ignore[arg-type]
    assert len(heard.frames) == len(problems) == 1
    return heard.frames[0], problems[0]


def test_the_steps_come_in_order_and_the_interpreter_last(log: list[str]) -> None:
    reply, problem = _wake(log)
    assert log == [*STEPS, "wake"]
    assert (reply["ev"], problem) == ("end", "")


@pytest.mark.parametrize("failing", range(len(STEPS)))
def test_a_failed_step_is_named_and_ends_the_wake(
    log: list[str], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(kernel, STEPS[failing], fail)
    reply, problem = _wake(log)
    assert (reply["ev"], reply["type"]) == ("error", "WakeFailed")
    assert f"step {NAMES[failing]!r}" in reply["error"] == problem
    assert log == STEPS[:failing]


def test_the_kernel_takes_entropy() -> None:
    try:
        kernel.add_entropy(os.urandom(64))
    except PermissionError:
        pytest.skip("needs CAP_SYS_ADMIN")


def test_overwriting_keeps_the_inode_and_cuts_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "id"
    kernel.overwrite(str(path), "a longer text\n")
    inode = path.stat().st_ino
    kernel.overwrite(str(path), "short\n")
    assert path.read_text() == "short\n"
    assert path.stat().st_ino == inode


def test_the_port_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PORTS", str(tmp_path))
    for device, name in [("vport0p1", "console"), ("vport1p3", "forkd.agent")]:
        (tmp_path / device).mkdir()
        (tmp_path / device / "name").write_text(name + "\n")
    assert kernel.find_port() == "/dev/vport1p3"


def test_a_missing_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PORTS", str(tmp_path / "none"))
    with pytest.raises(OSError, match=r"forkd\.agent"):
        kernel.find_port(deadline_s=0)


@pytest.fixture
def no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_hooks", [])


def test_hooks_run_in_order_and_stay_registered(no_hooks: None) -> None:
    ran: list[str] = []

    @hooks.after_fork
    def first() -> None:
        ran.append("first")

    hooks.after_fork(lambda: ran.append("second"))
    hooks.run_all()
    hooks.run_all()
    assert ran == ["first", "second"] * 2
    first()
    assert ran[-1] == "first"


def test_a_raising_hook_is_named_and_stops_the_rest(no_hooks: None) -> None:
    ran: list[str] = []

    @hooks.after_fork
    def bad() -> None:
        raise SystemExit(1)

    hooks.after_fork(lambda: ran.append("after"))
    with pytest.raises(hooks.HookFailed, match="bad raised SystemExit: 1"):
        hooks.run_all()
    assert ran == []


def test_a_hook_must_be_callable(no_hooks: None) -> None:
    with pytest.raises(TypeError, match="not int"):
        hooks.after_fork(1)  # type: ignore[type-var]
