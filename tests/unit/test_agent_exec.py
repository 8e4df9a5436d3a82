"""Commands: their streams, their limits, and that ending one ends all of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd_agent.execs import DEFAULT_CAP_BYTES, STDIN_BYTES
from tests.framework.agent_client import (
    AgentProcess,
    Client,
    alive,
    attached,
    joined,
    wait_for,
    wait_until_still,
)

Pair = tuple[AgentProcess, Client]


@pytest.fixture
def cgroup() -> Iterator[str]:
    """A cgroup v2 folder of our own, where this system lets us have one."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    roots = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    folder = Path(roots[0] if roots else "/nonexistent") / f"forkd-test-{os.urandom(4).hex()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup v2 to work in: {e}")
    yield str(folder)
    for inner in folder.glob("exec-*"):
        inner.rmdir()
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the test's cgroup is empty")
    folder.rmdir()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with attached(tmp_path) as both:
        yield both


@pytest.fixture(params=["proc", "cgroup"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """The agent with each way of finding a tree."""
    options = ["--cgroup", request.getfixturevalue("cgroup")] if request.param == "cgroup" else []
    with attached(tmp_path, *options) as both:
        yield both


def test_streams_and_exit_code(pair: Pair) -> None:
    end, out, err = pair[1].run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (out, err) == (b"out\n", b"err\n")
    assert end["exit_code"] == 3
    assert end["timed_out"] is False
    assert end["truncated"] == {"1": False, "2": False}


def test_output_comes_while_the_command_runs(pair: Pair) -> None:
    client = pair[1]
    number = client.send("exec", args=["sh", "-c", "echo first; read line; echo $line"], stdin=True)
    assert client.next(number)["ev"] == "start"
    assert joined([client.next(number)], 1) == b"first\n"
    client.feed(number, b"second\n")
    assert client.output(number)[1] == b"second\n"


def test_environment_and_folder(pair: Pair, tmp_path: Path) -> None:
    _, out, _ = pair[1].run("sh", "-c", "echo $A; pwd; echo $PATH", env={"A": "b c"}, cwd=str(tmp_path))
    assert out.splitlines() == [b"b c", str(tmp_path).encode(), os.environ["PATH"].encode()]


def test_any_bytes_come_through(pair: Pair) -> None:
    _, out, _ = pair[1].run("printf", r"\377\000\n")
    assert out == b"\xff\x00\n"


def test_commands_inherit_no_files(pair: Pair) -> None:
    client = pair[1]
    other = client.send("exec", args=["cat"], stdin=True)
    _, out, _ = client.run("ls", "/proc/self/fd")
    assert out.split() == [b"0", b"1", b"2", b"3"]  # 3 is the folder being listed
    client.more(other, "cancel")


@pytest.mark.parametrize(
    ("args", "cwd", "kind", "text"),
    [
        (["no-such-program"], None, "FileNotFoundError", "cannot run 'no-such-program'"),
        (["/etc/passwd"], None, "PermissionError", "cannot run '/etc/passwd'"),
        (["/etc"], None, "PermissionError", "cannot run '/etc'"),
        (["true"], "/no-such-folder", "FileNotFoundError", "'/no-such-folder' as the working folder"),
        (["true"], "/etc/passwd", "NotADirectoryError", "'/etc/passwd' as the working folder"),
        (["x" * 100_000], None, "OSError", "File name too long"),
    ],
)
def test_what_cannot_be_started_is_named(
    pair: Pair, args: list[str], cwd: str | None, kind: str, text: str
) -> None:
    agent, client = pair
    before = agent.fds()
    reply = client.call("exec", args=args, cwd=cwd)
    assert (reply["ev"], reply["type"]) == ("error", kind)
    assert text in reply["error"] or len(args[0]) > 1000
    assert agent.fds() == before


def test_stdin_is_empty_unless_asked_for(pair: Pair) -> None:
    assert pair[1].run("cat")[1] == b""


def test_stdin_streams_through(pair: Pair) -> None:
    client = pair[1]
    content = os.urandom(700_000)
    number = client.send("exec", args=["cat"], stdin=True)
    for start in range(0, len(content), 40_000):
        client.feed(number, content[start : start + 40_000])
    client.more(number, "eof")
    end, out, _ = client.output(number)
    assert out == content
    assert end["exit_code"] == 0


def test_input_nobody_reads_is_bounded(pair: Pair) -> None:
    client = pair[1]
    number = client.send("exec", args=["sleep", "1000"], stdin=True)
    pid = client.next(number)["pid"]
    for _ in range(STDIN_BYTES // 40_000 + 3):
        client.feed(number, b"x" * 40_000)
    assert client.finish(number)[0]["type"] == "BufferError"
    wait_for(lambda: not alive(pid), "the command is killed")


def test_a_command_that_closes_its_input_may_go_on(pair: Pair) -> None:
    client = pair[1]
    number = client.send("exec", args=["sh", "-c", "exec 0<&-; echo closed; sleep 0.1; exit 5"], stdin=True)
    assert client.next(number)["ev"] == "start"
    client.next(number)
    client.feed(number, b"x" * 40_000)
    client.feed(number, b"x" * 40_000)
    assert client.finish(number)[0]["exit_code"] == 5


def test_signal_reaches_the_command(pair: Pair) -> None:
    client = pair[1]
    number = client.send(
        "exec", args=["sh", "-c", "trap 'echo got; exit 7' TERM; echo on; while :; do sleep 0.01; done"]
    )
    client.next(number)
    client.next(number)
    client.more(number, "signal", sig=signal.SIGTERM)
    end, out, _ = client.output(number)
    assert (end["exit_code"], out) == (7, b"got\n")


def test_death_by_a_signal_is_a_negative_exit_code(pair: Pair) -> None:
    assert pair[1].run("sh", "-c", "kill -SEGV $$")[0]["exit_code"] == -signal.SIGSEGV


def test_a_signal_that_does_not_exist_ends_the_request(pair: Pair) -> None:
    client = pair[1]
    number = client.send("exec", args=["sleep", "1000"])
    pid = client.next(number)["pid"]
    client.more(number, "signal", sig=999)
    assert client.finish(number)[0]["type"] == "BadRequest"
    wait_for(lambda: not alive(pid), "the command is killed")


# Prints the pid of a grandchild that has left its session, its process group and its parent.
_DAEMON = "(setsid sh -c 'echo $$; exec sleep 1000' &) ; "


@pytest.mark.parametrize("daemon", [_DAEMON, "setsid sh -c 'echo $$; exec sleep 1000' & "])
def test_a_time_limit_ends_the_whole_tree(either: Pair, daemon: str) -> None:
    client = either[1]
    end, out, _ = client.run("sh", "-c", daemon + "sleep 1000", timeout=0.5)
    assert (end["timed_out"], end["exit_code"]) == (True, -signal.SIGKILL)
    wait_for(lambda: not alive(int(out)), "the daemonised grandchild is killed")


def test_with_cgroups_even_a_clean_environment_is_no_way_out(cgroup: str, tmp_path: Path) -> None:
    with attached(tmp_path, "--cgroup", cgroup) as (_, client):
        script = "(env -i /usr/bin/setsid /bin/sh -c 'echo $$; exec sleep 1000' &) ; sleep 1000"
        _, out, _ = client.run("sh", "-c", script, timeout=0.5)
        wait_for(lambda: not alive(int(out)), "the grandchild is killed")
        client.run("true")
        wait_for(
            lambda: client.run("true") and not list(Path(cgroup).glob("exec-*")), "its cgroup is removed"
        )


def test_cancel_ends_the_whole_tree(either: Pair) -> None:
    client = either[1]
    number = client.send("exec", args=["sh", "-c", _DAEMON + "sleep 1000"])
    client.next(number)
    pid = int(joined([client.next(number)], 1))
    client.more(number, "cancel")
    end, _, _ = client.output(number)
    assert (end["exit_code"], end["timed_out"]) == (-signal.SIGKILL, False)
    wait_for(lambda: not alive(pid), "the daemonised grandchild is killed")


def test_what_a_command_leaves_behind_lives_and_is_not_waited_for(either: Pair) -> None:
    agent, client = either
    before = agent.fds()
    script = "(while echo noise; do sleep 0.01; done) & echo $!"
    end, out, _ = client.run("sh", "-c", script)
    assert end["exit_code"] == 0
    pid = int(out.replace(b"noise", b"").split()[0])
    for _ in range(20):  # its output is still taken, so it is not killed by a broken pipe
        client.run("true")
    assert alive(pid)
    client.run("kill", "-9", str(pid))
    wait_for(lambda: agent.fds() == before, "its pipes are closed when it is gone")


def test_output_over_the_cap_is_dropped_and_marked(pair: Pair) -> None:
    client = pair[1]
    end, out, err = client.run("sh", "-c", "head -c 5000 /dev/zero; echo fine >&2", cap=1000)
    assert (len(out), err) == (1000, b"fine\n")
    assert end["truncated"] == {"1": True, "2": False}
    assert end["exit_code"] == 0
    end, out, _ = client.run("head", "-c", str(DEFAULT_CAP_BYTES + 1), "/dev/zero")
    assert (len(out), end["truncated"]["1"]) == (DEFAULT_CAP_BYTES, True)
    end, out, _ = client.run("head", "-c", "1000", "/dev/zero", cap=1000)
    assert (len(out), end["truncated"]["1"]) == (1000, False)


def test_a_flood_starves_nobody(pair: Pair) -> None:
    client = pair[1]
    flood = client.send("exec", args=["yes"])
    for _ in range(20):
        assert client.run("echo", "calm")[1] == b"calm\n"
        assert client.eval("6 * 7")["result"] == "42"
    client.more(flood, "cancel")
    end, out, _ = client.output(flood)
    assert end["truncated"]["1"] is True
    assert len(out) == DEFAULT_CAP_BYTES


def test_output_nobody_reads_stays_in_its_pipe(pair: Pair) -> None:
    agent, client = pair
    size = 48 * 1024 * 1024
    number = client.send("exec", args=["head", "-c", str(size), "/dev/zero"], cap=size)
    pid = client.next(number)["pid"]
    wait_until_still(lambda: Path(f"/proc/{agent.pid}/io").read_text(), "the agent reads no more")
    assert alive(pid), "the command got rid of output that nobody has read"
    _, out, _ = client.output(number)
    assert len(out) == size
    peak = next(
        ln for ln in Path(f"/proc/{agent.pid}/status").read_text().splitlines() if ln.startswith("VmHWM")
    )
    assert int(peak.split()[1]) < 40 * 1024, "the agent held the output in memory"


def test_hundreds_of_commands_leave_nothing(either: Pair) -> None:
    agent, client = either
    client.run("true")
    fds, children = agent.fds(), agent.children()
    numbers = [client.send("exec", args=["sh", "-c", f"exit {n % 7}"], timeout=1000) for n in range(100)]
    assert [client.finish(n)[0]["exit_code"] for n in numbers] == [n % 7 for n in range(100)]
    for _ in range(200):
        client.run("true")
    assert agent.fds() == fds
    assert agent.children() == children


def test_too_many_at_once_are_refused_not_lost(pair: Pair) -> None:
    client = pair[1]
    numbers = [client.send("exec", args=["cat"], stdin=True) for _ in range(230)]
    for number in numbers:
        client.more(number, "eof")
    ends = [client.finish(n)[0] for n in numbers]
    assert {e.get("exit_code", e.get("type")) for e in ends} <= {0, "Busy", "OSError"}
    assert sum(e["ev"] == "end" for e in ends) >= 100
    assert client.run("echo", "again")[1] == b"again\n"
