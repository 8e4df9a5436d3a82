"""The verbs that reach into one sandbox: exec, eval, ping; by id through the daemon, or by address directly."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forkd.cli import output
from forkd.cli.session import Passing, Refused, connect, settings
from forkd.names import SandboxId

if TYPE_CHECKING:
    from forkd.client.direct import Agent

app = typer.Typer()

_PING_SECS = 5.0

WordsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ID] -- ...", show_default=False)]
TargetOption = Annotated[
    str | None,
    typer.Option(
        help="Talk to the agent at this address instead.", envvar="FORKD_TARGET", metavar="HOST:PORT"
    ),
]
ChildOption = Annotated[str | None, typer.Option(help="The sandbox, as an option.", metavar="ID")]
DEFAULT_TARGET = "10.42.0.2:8888"


@app.command("exec", cls=Passing)
def exec_(
    ctx: typer.Context,
    words: WordsArgument = None,
    target: TargetOption = None,
    child: ChildOption = None,
    timeout_secs: Annotated[float, typer.Option(min=0.001, help="Kill the command after this long.")] = 30,
) -> None:
    """Run a command in a sandbox; its output and exit code become ours.

    \b
    forkd exec sb-0123abcd -- uname -a
    forkd exec --target 127.0.0.1:40001 -- python3 -V
    """
    sandbox_id, args = _split(ctx, words, child, target)
    if not args:
        raise typer.BadParameter("say what to run after --", param_hint="COMMAND")
    if sandbox_id is None:
        reply = _agent(target, timeout_secs, lambda agent: agent.exec(args, timeout_secs, None, None))
    else:
        reply = connect(ctx).exec_command(sandbox_id, args, timeout_secs)
    finish(reply)


@app.command("eval", cls=Passing)
def eval_(
    ctx: typer.Context, words: WordsArgument = None, target: TargetOption = None, child: ChildOption = None
) -> None:
    """Evaluate one expression in a sandbox's warmed interpreter.

    \b
    forkd eval sb-0123abcd -- "numpy.arange(10).sum()"
    """
    sandbox_id, args = _split(ctx, words, child, target)
    if not args:
        raise typer.BadParameter("say what to evaluate after --", param_hint="EXPRESSION")
    code = " ".join(args)
    if sandbox_id is None:
        reply = _agent(target, 30, lambda agent: agent.eval(code))
    else:
        reply = connect(ctx).eval_code(sandbox_id, code)
    if reply.get("error") is not None:
        output.error(str(reply.get("traceback") or reply.get("stack") or reply["error"]).rstrip())
        raise typer.Exit(1)
    print(reply["result_json"] if "result_json" in reply else reply.get("result"))


@app.command(cls=Passing)
def ping(
    ctx: typer.Context, words: WordsArgument = None, target: TargetOption = None, child: ChildOption = None
) -> None:
    """Ask a sandbox's agent whether it is well."""
    sandbox_id, _ = _split(ctx, words, child, target)
    if sandbox_id is None:
        output.as_json(_agent(target, _PING_SECS, lambda agent: agent.ping()))
    else:
        output.as_json(connect(ctx).ping_sandbox(sandbox_id))


def finish(reply: dict[str, Any]) -> None:
    """Print what a command wrote and leave with its exit code, a signal's as a shell would give it."""
    if "error" in reply and "stdout" not in reply:
        raise Refused(str(reply["error"]))
    sys.stdout.write(reply.get("stdout", ""))
    sys.stdout.flush()
    sys.stderr.write(reply.get("stderr", ""))
    if reply.get("truncated"):
        output.say("forkd: the output was over the limit and is cut short")
    if reply.get("timed_out"):
        output.error("the command ran into its time limit and was killed", "raise --timeout-secs")
    code = int(reply.get("exit_code", 1))
    raise typer.Exit(code if code >= 0 else 128 - code)


def _split(
    ctx: typer.Context, words: list[str] | None, child: str | None, target: str | None
) -> tuple[str | None, list[str]]:
    """The sandbox id, or None for an agent reached directly; and what was passed on."""
    words, passed = list(words or []), settings(ctx).passed
    if child is None and words and not _explicit(ctx, target):
        child = words.pop(0)
    return (None if child is None else str(SandboxId(child))), words + (passed or [])


def _explicit(ctx: typer.Context, target: str | None) -> bool:
    # FORKD_TARGET says where agents are found by default; it does not outweigh an id that was typed.
    return target is not None and target != os.environ.get("FORKD_TARGET")


def _agent(target: str | None, timeout: float, ask: Any) -> dict[str, Any]:
    from forkd.client.direct import Agent

    where = target or DEFAULT_TARGET
    try:
        reply: dict[str, Any] = ask(Agent(where, timeout))
    except (OSError, RuntimeError, ValueError) as e:
        raise Refused(
            f"no answer from the agent at {where}: {e}", hint="`forkd ls` shows ids and addresses"
        ) from e
    return reply
