"""`forkd fork`: children in the foreground, gone when the command ends; what the reference's SDK runs.

The daemon owns them. This process only keeps them alive, so that even its sudden death leaves nothing.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from forkd.cli.session import Refused, connect
from forkd.cli.signals import Terminated
from forkd.names import Tag

app = typer.Typer()

DEFAULT_TARGET = "10.42.0.2:8888"


@app.command()
def fork(
    ctx: typer.Context,
    tag: Annotated[str, typer.Option(help="Snapshot to fork.")],
    n: Annotated[int, typer.Option("-n", "--n", min=1, max=1000, help="How many.")],
    settle_secs: Annotated[float, typer.Option(min=0, help="Stay this long, then kill them.")] = 2,
    memory_limit_mib: Annotated[int | None, typer.Option(min=1, help="Memory cap of each.")] = None,
    per_child_netns: Annotated[bool, typer.Option("--per-child-netns", hidden=True)] = False,
    live_fork: Annotated[bool, typer.Option("--live-fork", hidden=True)] = False,
    hugepages: Annotated[bool, typer.Option("--hugepages", hidden=True)] = False,
    keep_workdir: Annotated[bool, typer.Option("--keep-workdir", hidden=True)] = False,
) -> None:
    """Fork children, hold them for a while, and kill them.

    The first one answers at $FORKD_TARGET (10.42.0.2:8888), as the E2B-style Sandbox class expects.

    \b
    forkd fork --tag numpy -n 100
    forkd fork --tag numpy -n 1 --settle-secs 3600
    """
    del keep_workdir  # accepted for compatibility: the daemon keeps no work folder
    if hugepages and not live_fork:
        raise typer.BadParameter("--hugepages needs --live-fork")
    options = {
        "memory_limit_mib": memory_limit_mib,
        "per_child_netns": per_child_netns,
        "live_fork": live_fork,
        "hugepages": hugepages,
    }
    try:
        _hold(ctx, str(Tag(tag)), n, settle_secs, options)
    except Terminated:
        return  # being told to end is how this command usually ends


def _hold(ctx: typer.Context, tag: str, n: int, settle_secs: float, options: dict[str, Any]) -> None:
    from forkd.cli import children, relay
    from forkd.client.keepalive import TTL_SECS, KeepAlive

    target = os.environ.get("FORKD_TARGET") or DEFAULT_TARGET
    with relay.claimed(target) as listener:
        controller = connect(ctx)
        started = time.perf_counter()
        rows, timing = children.spawn(controller, tag, n, ttl_secs=TTL_SECS, **options)
        ids = [row["id"] for row in rows]
        keepalive = passing = None
        try:
            keepalive = KeepAlive(controller, ids)
            _report(timing, (time.perf_counter() - started) * 1000, alive=len(ids), n=n)
            if listener is None:
                print(f"{target} is not an address of this host; child 1 answers at {rows[0]['guest_addr']}")
            else:
                passing = relay.Relay(listener, rows[0]["guest_addr"])
            if keepalive.gone.wait(settle_secs):
                raise Refused(
                    "all children are gone before their time", hint="`forkd ls` may say why they died"
                )
        finally:
            if keepalive:
                keepalive.stop()
            if passing:
                passing.close()
            children.remove(controller, ids)


def _report(timing: dict[str, float], total_ms: float, *, alive: int, n: int) -> None:
    running_ms = timing.get("running", total_ms)
    print(f"machines running : {running_ms:.1f} ms")
    print(f"children awake   : {timing.get('ready', total_ms):.1f} ms")
    print(f"total wall-clock : {total_ms:.1f} ms")
    print(f"{alive} / {n} children alive", flush=True)
