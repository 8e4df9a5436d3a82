"""The verbs about the installation itself: doctor, cleanup, where, version."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Annotated, Any
from urllib.error import URLError

import typer

import forkd
from forkd.cli import output
from forkd.cli.session import connect, connect_if_running, data_dir

app = typer.Typer()

_GLYPHS = {"pass": output.TICK, "warn": "!", "fail": output.CROSS}
# What runs of the reference system leave in the temporary folder.
_LEFTOVERS = ("forkd-fork-", "forkd-parent-", "forkd-unpack-", "forkd-pull-")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def doctor(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Say what this host can run, what it lacks, and how to get it. Exits 1 if something needed is missing."""
    report = _report(ctx)
    checks: list[dict[str, Any]] = report["checks"]
    if as_json:
        output.as_json(report)
    else:
        width = max(len(str(check["name"])) for check in checks)
        for check in checks:
            glyph = _GLYPHS.get(check["level"], "?")
            print(f"{glyph} {check['name']:<{width}}  {output.shown(check.get('detail'))}")
            if check.get("hint"):
                print(f"  {'':<{width}}  hint: {check['hint']}")
        levels = [check["level"] for check in checks]
        print(" ".join(f"{level}={levels.count(level)}" for level in _GLYPHS))
        if report.get("verdict"):
            print(report["verdict"])
    if any(check["level"] == "fail" for check in checks):
        raise typer.Exit(1)


def _report(ctx: typer.Context) -> dict[str, Any]:
    from forkd.client.failures import ControllerError

    try:
        controller = connect(ctx)
        daemon = f"{controller.base_url}, version {controller.version().get('version')}"
        report = controller.host_report()
    except (ControllerError, URLError) as e:
        # Without a daemon there is no report, and that is itself the finding.
        problem, hint = getattr(e, "problem", str(e)), getattr(e, "hint", None)
        return {
            "checks": [{"name": "daemon", "level": "fail", "detail": problem, "hint": hint}],
            "verdict": None,
        }
    check = {"name": "daemon", "level": "pass", "detail": daemon, "hint": None}
    return {**report, "checks": [check, *report.get("checks", [])]}


@app.command()
def cleanup(
    ctx: typer.Context,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Remove, instead of only saying what.")] = False,
) -> None:
    """Find what killed runs left behind. Without -y nothing is removed."""
    verb = "DEL " if yes else "would remove "
    found = 0
    for path in _stale_folders():
        found += 1
        print(f"{verb}{path}")
        if yes:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for host in _stale_addresses():
        found += 1
        print(f"{verb}address {host} on lo")
        if yes:
            from forkd.cli import relay

            relay.remove_address(host)
    found += _dead_sandboxes(ctx, verb, remove=yes)
    if not found:
        output.say("nothing to clean up")
    elif not yes:
        output.say("nothing was removed; run `forkd cleanup -y` to do it")


def _stale_folders() -> list[Path]:
    """Leftovers in the temporary folder that belong to us and that no process has open."""
    folder = Path(tempfile.gettempdir())
    mine = [p for p in sorted(folder.iterdir()) if p.name.startswith(_LEFTOVERS) and _ours(p)]
    if not mine:
        return []
    held = _open_paths()
    stale = []
    for path in mine:
        if any(each == str(path) or each.startswith(f"{path}/") for each in held):
            output.say(f"SKIP {path}: in use")
        else:
            stale.append(path)
    return stale


def _ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)


def _open_paths() -> set[str]:
    """Every path some process has open, as far as we may look."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return found


def _stale_addresses() -> list[str]:
    from forkd.cli import relay
    from forkd.cli.fork import DEFAULT_TARGET
    from forkd.client.direct import split_target

    _, port = split_target(os.environ.get("FORKD_TARGET") or DEFAULT_TARGET)
    return [host for host in relay.left_addresses() if not relay.in_use(host, port)]


def _dead_sandboxes(ctx: typer.Context, verb: str, *, remove: bool) -> int:
    from forkd.cli import children

    controller = connect_if_running(ctx)
    if controller is None:
        return 0
    dead = [row for row in controller.list_sandboxes() if row.get("state") == "dead"]
    for row in dead:
        print(f"{verb}sandbox {row['id']}: {output.shown(row.get('reason'))}")
    if remove:
        children.remove(controller, [row["id"] for row in dead])
    return len(dead)


@app.command()
def where(ctx: typer.Context) -> None:
    """Print the data folder."""
    print(data_dir(ctx))


@app.command()
def version(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Print the version of this command, and of the daemon if one runs."""
    controller = connect_if_running(ctx)
    daemon = controller.version().get("version") if controller else None
    if as_json:
        output.as_json({"forkd": forkd.__version__, "daemon": daemon})
    else:
        print(f"forkd {forkd.__version__}")
        print(f"daemon {daemon or 'not running'}")
