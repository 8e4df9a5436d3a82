"""The agent's stream: attaching, interleaving, bad frames, hosts that vanish."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkd_agent.channel import Channel
from forkd_agent.loop import Loop
from forkd_agent.protocol import MAX_LINE_BYTES, VERSION
from tests.framework.agent_client import AgentProcess, Client, alive, attached, wait_for

Pair = tuple[AgentProcess, Client]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with attached(tmp_path_factory.mktemp("agent")) as pair:
        yield pair


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Pair]:
    with attached(tmp_path) as pair:
        yield pair


def test_hello_tells_who_is_there(shared: Pair) -> None:
    agent, client = shared
    reply = client.hello()
    assert (reply["version"], reply["pid"], reply["warm"]) == (VERSION, agent.pid, False)


def test_ping_has_the_published_keys(shared: Pair) -> None:
    reply = shared[1].call("ping")
    assert reply["pong"] is True
    assert reply["agent_lang"] == "python"
    assert reply["warmup_ready"] is False
    assert isinstance(reply["numpy_version"], str)
    assert reply["pid"] == shared[0].pid


def test_stats_are_plausible(shared: Pair) -> None:
    stats = shared[1].call("stats")
    assert 0 < stats["mem_available_kib"] <= stats["mem_total_kib"]
    assert 0 <= stats["disk_free_bytes"] <= stats["disk_total_bytes"]
    assert stats["uptime_s"] > 0
    assert stats["load1"] >= 0
    assert stats["processes"] >= 2


def test_a_quick_request_overtakes_a_slow_one(shared: Pair) -> None:
    client = shared[1]
    slow = client.send("exec", args=["cat"], stdin=True)
    thinking = client.send("eval", code="__import__('time').sleep(0.2) or 'done'")
    quick = client.send("eval", code="40 + 2")
    assert client.finish(quick)[0]["result"] == "42"
    assert client.run("echo", "hi")[1] == b"hi\n"
    client.more(slow, "eof")
    assert client.finish(slow)[0]["exit_code"] == 0
    assert client.finish(thinking)[0]["result"] == "'done'"


BAD_FIELDS: list[dict[str, Any]] = [
    {"op": "bogus"},
    {"op": ["exec"]},
    {},
    {"op": "hello"},
    {"op": "hello", "nonce": "x" * 5000},
    {"op": "exec"},
    {"op": "exec", "args": []},
    {"op": "exec", "args": "ls"},
    {"op": "exec", "args": [1]},
    {"op": "exec", "args": ["a\0b"]},
    {"op": "exec", "args": ["true"], "timeout": 0},
    {"op": "exec", "args": ["true"], "timeout": float("nan")},
    {"op": "exec", "args": ["true"], "timeout": True},
    {"op": "exec", "args": ["true"], "cap": -1},
    {"op": "exec", "args": ["true"], "env": {"A=B": "c"}},
    {"op": "exec", "args": ["true"], "env": {"A": 1}},
    {"op": "exec", "args": ["true"], "env": {"A": "\ud800"}},
    {"op": "exec", "args": ["true"], "stdin": "yes"},
    {"op": "exec", "args": ["true"], "pty": {"rows": 24}},
    {"op": "eval"},
    {"op": "eval", "code": 1},
    {"op": "eval", "code": "1", "timeout": -1},
    {"op": "read"},
    {"op": "read", "path": "relative"},
    {"op": "read", "path": "/etc/host\0name"},
    {"op": "read", "path": "/etc/hostname", "offset": -1},
    {"op": "read", "path": "/etc/hostname", "limit": 2**64},
    {"op": "write", "path": "relative"},
    {"op": "write", "path": "/tmp/x", "mode": 0o10000},
    {"op": "write", "path": "/tmp/x", "mkdirs": 1},
    {"op": "warm", "script": 1},
    {"op": "warm", "script": "", "env": []},
    {"op": "wake"},
    {"op": "wake", "entropy": "AAAA", "realtime_ns": 1, "hostname": "a", "machine_id": "", "boot_id": ""},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda f: json.dumps(f)[:50])
def test_bad_fields_are_named_and_harm_nothing(shared: Pair, fields: dict[str, Any]) -> None:
    client = shared[1]
    client._last += 1
    client.raw(json.dumps({"id": client._last, **fields}).encode() + b"\n")
    reply = client.finish(client._last)[0]
    assert (reply["ev"], reply["type"]) == ("error", "BadRequest"), reply
    assert reply["error"]
    assert client.call("ping")["pong"]


def test_an_id_in_use_is_refused_and_its_command_ended(shared: Pair) -> None:
    client = shared[1]
    number = client.send("exec", args=["sleep", "1000"])
    pid = client.next(number)["pid"]
    client.more(number, "ping")
    assert "still open" in client.finish(number)[0]["error"]
    wait_for(lambda: not alive(pid), "the command is killed")


def test_input_for_a_request_that_has_ended_is_ignored(shared: Pair) -> None:
    client = shared[1]
    for op in ("data", "eof", "signal", "cancel"):
        client.more(2**40, op)
    assert client.call("ping")["pong"]


@given(st.lists(st.binary(max_size=200), max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_lines_are_dropped(shared: Pair, lines: list[bytes]) -> None:
    client = shared[1]
    client.raw(b"\n".join(lines) + b"\n")
    assert client.call("ping")["pong"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# Not exec, write or warm: with fields that happen to be right these would act on the machine under test.
_ops = st.sampled_from(["hello", "ping", "wake", "eval", "read", "data", "eof", "signal", "cancel", "stats"])
_names = st.sampled_from(
    ["code", "nonce", "path", "timeout", "b", "sig", "offset", "limit", "entropy", "hostname"]
)


@given(op=_ops | _json, fields=st.dictionaries(_names, _json, max_size=4))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_with_any_fields_leave_the_agent_serving(
    shared: Pair, op: Any, fields: dict[str, Any]
) -> None:
    client = shared[1]
    client.raw(json.dumps({**fields, "op": op, "id": 2**41}).encode() + b"\n")
    client.hello()  # ends whatever that has opened
    assert client.call("ping")["pong"]


def test_a_line_over_the_cap_is_dropped_and_counted(own: Pair) -> None:
    client = own[1]
    client.raw(b'{"id":1,"op":"ping","pad":"' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n')
    assert client.call("stats")["dropped_lines"] >= 1


def test_a_frame_cut_by_a_vanished_host_does_not_hurt_the_next(own: Pair) -> None:
    client = own[1]
    client.raw(b'{"id":1,"op":"exec","args":["touch"')
    client.hello()
    assert client.call("ping")["pong"]


def test_a_reset_ends_the_line_that_is_half_written() -> None:
    ours, theirs = socket.socketpair()
    loop, fd = Loop(), ours.detach()
    channel = Channel(loop, fd, fd, lambda frame: None, lambda: None)
    for number in range(40):
        channel.send({"id": number, "pad": "x" * 50_000})
    loop.turn()  # writes until the socket is full, which is within a line
    channel.reset()
    channel.send({"id": 99})
    theirs.setblocking(False)
    data = b""
    while not data.endswith(b'{"id":99}\n'):
        try:
            data += theirs.recv(1 << 20)
        except BlockingIOError:
            loop.turn()
    lines = data.splitlines()
    assert lines[-1] == b'{"id":99}'
    assert len(lines) < 40
    channel.close()
    theirs.close()


def test_attaching_again_mid_frame_drops_the_old_output_and_keeps_the_command(
    own: Pair, tmp_path: Path
) -> None:
    """The client reads nothing until the agent has half of a frame stuck in the socket."""
    client = own[1]
    done = tmp_path / "done"
    script = f"head -c 6000000 /dev/zero; touch {done}; exec sleep 1000"
    number = client.send("exec", args=["sh", "-c", script], cap=10**8, timeout=0.05)
    pid = client.next(number)["pid"]
    client.hello()
    wait_for(done.exists, "the output is read to its end although nobody wants it")
    reply = client.call("ping")
    assert reply["pong"]
    assert not client._kept[number], "output of the earlier attachment"
    assert alive(pid), "the time limit of a detached command no longer applies"
    client.run("kill", "-9", str(pid))


def test_the_command_of_a_lost_connection_runs_on(own: Pair, tmp_path: Path) -> None:
    agent, client = own
    go, done = tmp_path / "go", tmp_path / "done"
    script = f"while ! [ -e {go} ]; do echo waiting; sleep 0.01; done; touch {done}"
    number = client.send("exec", args=["sh", "-c", script])
    client.next(number)
    client.close()
    second = Client(agent.path)
    go.touch()
    wait_for(done.exists, "the command ends by itself")
    assert second.call("ping")["pong"]
    second.close()


def test_many_hosts_one_after_the_other_leave_no_files_open(own: Pair) -> None:
    agent, client = own
    client.close()
    counts = []
    for _ in range(20):
        again = Client(agent.path)
        again.run("true")
        counts.append(agent.fds())
        again.close()
    assert counts[0] == counts[-1]
