"""The `forkd` command: puts the families of verbs together. Each family is a file beside this one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import forkd
from forkd.cli import fork, images, inside, run, sandboxes, signals, snapshots, upkeep
from forkd.cli.session import Root, settings

app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"forkd {forkd.__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    daemon_url: Annotated[
        str | None,
        typer.Option(envvar="FORKD_URL", metavar="URL", help="http://host:port or unix:///path/forkd.sock."),
    ] = None,
    daemon_token: Annotated[str | None, typer.Option(envvar="FORKD_TOKEN", hidden=True)] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FORKD_DATA_DIR", help="Where images and snapshots live.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fork warmed sandboxes in milliseconds.

    \b
    forkd image build python-numpy                            build an image
    forkd snapshot create --tag numpy --image python-numpy    warm a parent and capture it
    forkd spawn --tag numpy -n 10                             fork ten children
    forkd eval ID -- "numpy.arange(10).sum()"                 compute in one of them
    forkd kill --all

    A private daemon starts by itself when none is named with --daemon-url.
    """
    del version
    chosen = settings(ctx)
    chosen.url, chosen.token, chosen.data_dir = daemon_url, daemon_token, data_dir


app.add_typer(images.app, name="image")
app.add_typer(snapshots.app, name="snapshot")
for family in (fork, sandboxes, inside, run, upkeep):
    app.add_typer(family.app)

# The reference system's names for the same things.
app.command("images", hidden=True)(snapshots.list_)
app.command("rmi", hidden=True)(snapshots.rm)
app.command("snapshot-info", hidden=True)(snapshots.info)

for extra in ("bench", "quickstart"):
    if find_spec(f"forkd.cli.{extra}") is not None:
        app.add_typer(import_module(f"forkd.cli.{extra}").app, name=extra)


def main() -> None:
    signals.raise_when_told_to_end()
    app(prog_name="forkd")


if __name__ == "__main__":
    main()
