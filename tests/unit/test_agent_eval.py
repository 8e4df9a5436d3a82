"""The warmed interpreter: what an expression may be, what its death costs, what waking renews."""

from __future__ import annotations

import ast
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkd_agent import remote
from forkd_agent.evals import MAX_CRASHES
from forkd_agent.protocol import pack_bytes
from tests.framework.agent_client import WAKE, AgentProcess, Client, attached, wait_for

Pair = tuple[AgentProcess, Client]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with attached(tmp_path_factory.mktemp("agent")) as (_, client):
        yield client


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with attached(tmp_path) as both:
        yield both


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 + 1", "2"),
        ("  \t1 + 1", "2"),
        ("'é\\u4e00'", "'é一'"),
        ("[x * x for x in range(4)]", "[0, 1, 4, 9]"),
        ("(lambda n: n + 1)(1)", "2"),
        ("__import__('os').path.sep", "'/'"),
        ("None", "None"),
        ("type('R', (), {'__repr__': lambda self: '\\ud800'})()", "\\ud800"),
    ],
)
def test_an_expression_has_a_repr(shared: Client, code: str, result: str) -> None:
    reply = shared.eval(code)
    assert (reply["ev"], reply["result"], reply["exit_code"]) == ("end", result, 0)
    assert "truncated" not in reply


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "SyntaxError: "),
        ("import os", "SyntaxError: "),
        ("", "SyntaxError: "),
        ("no_such_name", "NameError: name 'no_such_name' is not defined"),
        ("exit(3)", "SystemExit: 3"),
        ("(_ for _ in ()).throw(KeyboardInterrupt)", "KeyboardInterrupt: "),
        ("'\\0'.join(1)", "TypeError: "),
        ("(" * 500, "SyntaxError: "),
        ("(_ for _ in ()).throw(type('E', (Exception,), {'__str__': lambda s: 1 / 0}))", "E: its message"),
        ("type('R', (), {'__repr__': lambda self: 1 / 0})()", "ZeroDivisionError: "),
        (
            "(_ for _ in ()).throw(eval('type(\"E\", (Exception,), {})', {}))",
            "E: ",
        ),
    ],
)
def test_an_error_is_a_result(shared: Client, code: str, error: str) -> None:
    reply = shared.eval(code)
    assert (reply["ev"], reply["exit_code"]) == ("end", 1)
    assert reply["error"].startswith(error), reply
    assert "forkd_agent" not in reply["traceback"]
    assert "result" not in reply


def test_nothing_is_kept_between_calls(shared: Client) -> None:
    assert shared.eval("globals().__setitem__('kept', 1)")["result"] == "None"
    assert shared.eval("kept")["error"].startswith("NameError")


@pytest.mark.parametrize("letter", ["'x'", "'\\x00'", "'\\u4e00'", "'\\U0001f600'", "'\\ud800'"])
def test_a_long_result_is_cut_and_marked(shared: Client, letter: str) -> None:
    code = f"type('R', (), {{'__repr__': lambda self: {letter} * 1000000}})()"
    reply = shared.eval(code)
    assert reply["truncated"] is True
    assert 8000 < len(reply["result"]) <= 64 * 1024


def test_a_long_error_fits_a_frame(shared: Client) -> None:
    reply = shared.eval("(_ for _ in ()).throw(ValueError('\\u4e00' * 1000000))")
    assert reply["error"].startswith("ValueError: ")
    assert reply["exit_code"] == 1


def test_a_time_limit_answers_and_blocks_nobody(shared: Client) -> None:
    slow = shared.eval("__import__('time').sleep(2)", timeout=0.05)
    assert slow["error"].startswith("TimeoutError: not finished after 0.05 seconds")
    assert slow["exit_code"] == 1
    assert shared.eval("1")["result"] == "1"


def test_cancel_answers_at_once(shared: Client) -> None:
    number = shared.send("eval", code="__import__('time').sleep(2)")
    shared.more(number, "cancel")
    assert shared.finish(number)[0]["type"] == "Cancelled"


def test_code_that_forks_gets_one_answer(shared: Client) -> None:
    # The original answers last, so an answer of the copy would be taken for its own.
    code = (
        "(lambda os: (lambda pid: os.waitpid(pid, 0)[1] if pid else 'the copy')(os.fork()))(__import__('os'))"
    )
    assert shared.eval(code)["result"] == "0"


def test_numpy_is_in_scope_when_it_can_be_imported(pair: Pair, tmp_path: Path) -> None:
    """A stand-in on the path shows that it is found late, once, and under both names."""
    client = pair[1]
    (tmp_path / "numpy.py").write_text("__version__ = '9.9'\nimport pathlib\nmark = object()\n")
    assert client.eval("np")["error"].startswith("NameError")
    client.call("warm", script=f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    assert client.eval("np is numpy")["result"] == "True"
    assert client.eval("id(np.mark)")["result"] == client.eval("id(numpy.mark)")["result"]
    client.call("warm", script="import numpy")
    assert client.call("ping")["numpy_version"] == "9.9"


def test_warm_up_sets_the_scene(pair: Pair) -> None:
    client = pair[1]
    reply = client.call("warm", script="import os\nanswer = 42\nseen = os.environ['A']", env={"A": "b"})
    assert reply["ok"] is True
    assert reply["seconds"] >= 0
    assert client.eval("__import__('__main__').answer")["result"] == "42"
    assert client.eval("__import__('__main__').seen")["result"] == "'b'"
    assert client.run("sh", "-c", "echo $A")[1] == b"b\n"
    assert client.call("ping")["warmup_ready"] is True
    assert client.hello()["warm"] is True


@pytest.mark.parametrize(
    ("script", "kind"),
    [("x = 1\n1 / 0", "ZeroDivisionError"), ("exit(1)", "SystemExit"), ("(", "SyntaxError")],
)
def test_a_failed_warm_up_says_where(pair: Pair, script: str, kind: str) -> None:
    client = pair[1]
    reply = client.call("warm", script=script)
    assert (reply["ev"], reply["type"]) == ("error", kind)
    assert '"<warm-up>", line' in reply["traceback"] or kind == "SystemExit"
    assert client.call("ping")["warmup_ready"] is False
    assert client.eval("1")["result"] == "1"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("__import__('os')._exit(3)", "exited with code 3"),
        ("__import__('os').kill(0, 9)", f"killed by signal {signal.SIGKILL.value}"),
    ],
)
def test_a_dead_interpreter_is_replaced_and_warmed_again(
    pair: Pair, tmp_path: Path, code: str, how: str
) -> None:
    agent, client = pair
    log = tmp_path / "warmed"
    client.call("warm", script=f"open({str(log)!r}, 'a').write('w'); state = 7")
    fds = agent.fds()
    other = client.send("eval", code="__import__('time').sleep(1000)")
    reply = client.eval(code)
    assert reply["error"].startswith("InterpreterDied: ") and how in reply["error"]
    assert "InterpreterDied" in client.finish(other)[0]["error"]
    wait_for(lambda: client.call("ping")["warmup_ready"], "the new interpreter is warm")
    assert log.read_text() == "ww"
    assert client.eval("__import__('__main__').state")["result"] == "7"
    assert agent.fds() == fds
    assert len(agent.children()) == 1


def test_a_warm_up_that_kills_its_interpreter_is_not_tried_for_ever(pair: Pair, tmp_path: Path) -> None:
    client = pair[1]
    log = tmp_path / "tries"
    reply = client.call("warm", script=f"import os; open({str(log)!r}, 'a').write('x'); os._exit(1)")
    assert (reply["ev"], reply["type"]) == ("error", "InterpreterDied")

    wait_for(lambda: client.eval("1").get("result") == "1", "an interpreter without warm-up")
    assert log.read_text() == "x" * MAX_CRASHES
    assert client.call("ping")["warmup_ready"] is False


_RANDOM = "import random, uuid, tempfile, ssl, forkd_agent\nrandom.seed(1)\nuuid.getnode()\nlog = []\n"


def test_wake_renews_what_children_would_share(pair: Pair) -> None:
    client = pair[1]
    client.call("warm", script=_RANDOM)
    drawn = []
    for _ in range(3):
        client.eval("__import__('random').seed(1)")
        assert client.call("wake", **WAKE)["ok"] is True
        drawn.append(
            (
                client.eval("__import__('random').random()")["result"],
                client.eval("__import__('uuid').getnode()")["result"],
            )
        )
    assert len({value for value, _ in drawn}) == 3
    assert len({node for _, node in drawn}) == 3


def test_hooks_run_in_order_before_anything_asked_after_the_wake(pair: Pair) -> None:
    client = pair[1]
    hooks = "\n".join(
        f"@forkd_agent.after_fork\ndef hook{n}():\n    import time; time.sleep(0.05); log.append({n})"
        for n in range(3)
    )
    client.call("warm", script=_RANDOM + hooks)
    wake = client.send("wake", **WAKE)
    seen = client.send("eval", code="__import__('__main__').log[:]")
    ran = client.send("exec", args=["true"])
    reply = client.finish(wake)[0]
    assert reply["clock_ns"] > 0
    assert client.finish(seen)[0]["result"] == "[0, 1, 2]"
    assert client.finish(ran)[0]["exit_code"] == 0
    assert client.order.index(wake) < min(client.order.index(seen), client.order.index(ran))


def test_a_failing_hook_fails_the_wake_and_nothing_runs(pair: Pair) -> None:
    client = pair[1]
    client.call("warm", script=_RANDOM + "@forkd_agent.after_fork\ndef bad():\n    raise OSError('no lease')")
    reply = client.call("wake", **WAKE)
    assert (reply["ev"], reply["type"]) == ("error", "WakeFailed")
    assert "bad" in reply["error"] and "no lease" in reply["error"]
    assert client.run("true")[0]["type"] == "NotAwake"
    assert client.eval("1")["type"] == "NotAwake"
    assert client.call("ping")["pong"] is True


def test_an_interpreter_that_dies_on_waking_fails_the_wake(pair: Pair) -> None:
    client = pair[1]
    client.call("warm", script=_RANDOM + "import os\nforkd_agent.after_fork(lambda: os._exit(1))")
    reply = client.call("wake", **WAKE)
    assert (reply["ev"], reply["type"]) == ("error", "WakeFailed")
    assert "exited with code 1" in reply["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("entropy", pack_bytes(bytes(63))),
        ("entropy", "not base64!"),
        ("realtime_ns", "now"),
        ("hostname", "a/b"),
        ("hostname", ""),
        ("machine_id", "0" * 31),
        ("boot_id", "x" * 36),
    ],
)
def test_a_wake_with_bad_fields_changes_nothing(shared: Client, field: str, value: Any) -> None:
    reply = shared.call("wake", **{**WAKE, field: value})
    assert reply["type"] == "BadRequest" and field in reply["error"]
    assert shared.eval("1")["result"] == "1"


def _remote(source: str, name: str | None, value: Any) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(remote.run(source, name, json.dumps(value)))
    return reply


def test_remote_code_and_functions() -> None:
    assert _remote("y = input * 2\ny + 1", None, 20) == {"ok": 41}
    assert _remote("y = input", None, 20) == {"ok": None}
    assert _remote("", None, 1) == {"ok": None}
    assert _remote("def f(x):\n    return {'got': x}", "f", [1, 2]) == {"ok": {"got": [1, 2]}}
    assert _remote("object", None, 1) == {"ok": {"repr": "<class 'object'>"}}
    assert _remote("{(1, 2): 3}", None, 1) == {"ok": {"repr": "{(1, 2): 3}"}}


def test_remote_errors_show_the_source() -> None:
    reply = _remote("def f(x):\n    return 1 / x  # here", "f", 0)
    assert reply["error"] == "ZeroDivisionError: division by zero"
    assert "# here" in reply["traceback"]
    assert _remote("raise SystemExit(2)", None, 0)["error"] == "SystemExit: 2"
    assert _remote("1", "g", 0)["error"] == "KeyError: 'g'"


def test_remote_numpy_values_become_plain() -> None:
    source = "class A:\n    def tolist(self):\n        return [1, 2]\nA.__module__ = 'numpy'\n{'a': A()}"
    assert _remote(source, None, 0) == {"ok": {"a": [1, 2]}}


def test_remote_through_eval_survives_the_result_cap(shared: Client) -> None:
    call = "__import__('forkd_agent.remote', fromlist=['run']).run({!r}, None, {!r})"
    reply = shared.eval(call.format("'\"' * input", "10000"))
    assert len(json.loads(ast.literal_eval(reply["result"]))["ok"]) == 10000
    reply = shared.eval(call.format("'x' * input", "100000"))
    assert "over the limit" in json.loads(ast.literal_eval(reply["result"]))["error"]
