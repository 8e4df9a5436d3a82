"""The verbs about sandboxes as a whole: spawn, ls, kill."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forkd.cli import output
from forkd.cli.session import Refused, connect
from forkd.names import SandboxId, Tag

app = typer.Typer()

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def spawn(
    ctx: typer.Context,
    tag: Annotated[str, typer.Option(help="Snapshot to fork.")],
    n: Annotated[int, typer.Option("-n", "--n", min=1, max=1000, help="How many.")] = 1,
    memory_limit_mib: Annotated[int | None, typer.Option(min=1, help="Memory cap of each.")] = None,
    ttl_secs: Annotated[int | None, typer.Option(min=1, help="Kill each after this long.")] = None,
    per_child_netns: Annotated[bool, typer.Option("--per-child-netns", hidden=True)] = False,
    prewarm: Annotated[bool, typer.Option("--prewarm", hidden=True)] = False,
    live_fork: Annotated[bool, typer.Option("--live-fork", hidden=True)] = False,
    hugepages: Annotated[bool, typer.Option("--hugepages", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Fork children of a snapshot and leave them running.

    \b
    forkd spawn --tag numpy -n 10
    forkd spawn --tag numpy --ttl-secs 600 --json
    """
    from forkd.cli import children

    controller = connect(ctx)
    rows, timing = children.spawn(
        controller,
        str(Tag(tag)),
        n,
        memory_limit_mib=memory_limit_mib,
        ttl_secs=ttl_secs,
        per_child_netns=per_child_netns,
        prewarm=prewarm,
        live_fork=live_fork,
        hugepages=hugepages,
    )
    unreported = [row["id"] for row in rows]
    try:
        _report(rows, timing, unreported, as_json=as_json)
    except BaseException:
        children.remove(controller, unreported)
        raise


def _report(
    rows: list[dict[str, Any]], timing: dict[str, float], unreported: list[str], *, as_json: bool
) -> None:
    if as_json:
        output.as_json(rows)
        unreported.clear()
    else:
        for row in rows:
            print(
                f"{output.TICK} {row['id']} guest={row['guest_addr']} netns={row.get('netns') or output.DASH}",
                flush=True,
            )
            unreported.remove(row["id"])
    if "ready" in timing:
        output.say(f"{len(rows)} awake in {timing['ready']:.1f} ms")


@app.command("ls")
def list_(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List sandboxes."""
    rows = connect(ctx).list_sandboxes()
    if as_json:
        output.as_json(rows)
        return
    if not rows:
        output.say("no live sandboxes; `forkd spawn --tag TAG` makes one")
        return
    output.table(("ID", "SNAPSHOT", "STATE", "ISOLATION", "PID", "AGE", "TTL", "GUEST_ADDR"), map(_row, rows))
    for row in rows:
        if row.get("state") == "dead":
            output.say(
                f"{row['id']} is dead: {output.shown(row.get('reason'))}; `forkd cleanup -y` removes it"
            )
    output.say(f"{len(rows)} sandbox{'' if len(rows) == 1 else 'es'}")


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    isolation = "/".join(str(row[name]) for name in ("isolation", "accel") if row.get(name))
    ttl = f"{row['ttl_secs']}s" if row.get("ttl_secs") else None
    age = output.age(row.get("created_at_unix"))
    return (
        row["id"],
        row["snapshot_tag"],
        row.get("state"),
        isolation,
        row["pid"],
        age,
        ttl,
        row["guest_addr"],
    )


@app.command()
def kill(
    ctx: typer.Context,
    ids: Annotated[list[str] | None, typer.Argument(help="Which ones.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    tag: Annotated[str | None, typer.Option(help="All children of this snapshot.")] = None,
) -> None:
    """Kill sandboxes: by id, all, or all of one snapshot.

    \b
    forkd kill sb-0123abcd
    forkd kill --tag numpy
    """
    from forkd.cli import children

    if [bool(ids), every, tag is not None].count(True) != 1:
        raise typer.BadParameter("say which: ids, --all or --tag TAG")
    for sandbox_id in ids or []:
        SandboxId(sandbox_id)
    wanted = str(Tag(tag)) if tag is not None else None
    controller = connect(ctx)
    if not ids:
        rows = controller.list_sandboxes()
        ids = [row["id"] for row in rows if wanted in (None, row["snapshot_tag"])]
        if not ids:
            output.say("nothing to kill")
    results = children.kill_each(controller, ids)
    for sandbox_id, e in results:
        print(f"{output.CROSS if e else output.TICK} {sandbox_id}")
        if e:
            output.error(getattr(e, "problem", str(e)), getattr(e, "hint", None))
    if failed := sum(e is not None for _, e in results):
        raise Refused(f"{failed} of {len(results)} sandboxes were not killed")
