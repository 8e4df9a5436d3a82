"""`forkd run`: one command in a fresh sandbox, from nothing but the name of an image."""

from __future__ import annotations

from typing import Annotated

import typer

from forkd.cli import images, output
from forkd.cli.inside import finish
from forkd.cli.session import Passing, connect, settings
from forkd.models import Accel
from forkd.names import ImageName, Tag

app = typer.Typer()


@app.command(cls=Passing)
def run(
    ctx: typer.Context,
    image: Annotated[str, typer.Option(help="Image to run in; built by its recipe if missing.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", show_default=False)] = None,
    accel: Annotated[Accel | None, typer.Option(help="How to boot it the first time.")] = None,
    timeout_secs: Annotated[float, typer.Option(min=0.001, help="Kill the command after this long.")] = 60,
) -> None:
    """Run one command in a sandbox of its own and leave with its exit code.

    The first run of an image boots it and keeps the snapshot `run-IMAGE`; later runs only fork.

    \b
    forkd run --image python-numpy -- python3 -c "import numpy; print(numpy.pi)"
    """
    from forkd.cli import children
    from forkd.client.controller import Controller
    from forkd.client.keepalive import TTL_SECS, KeepAlive

    args = (words or []) + (settings(ctx).passed or [])
    if not args:
        raise typer.BadParameter("say what to run after --", param_hint="COMMAND")
    name, tag = str(ImageName(image)), str(Tag(f"run-{image}"))
    controller: Controller = connect(ctx)
    if not any(row["tag"] == tag for row in controller.list_snapshots()):
        if not any(row["name"] == name for row in controller.list_images()):
            images.ensure(name, images.images_dir(ctx))
        with output.Activity(f"snapshot {tag}"):
            controller.create_snapshot(tag, image=name, accel=accel and accel.value)
    rows, _ = children.spawn(controller, tag, 1, ttl_secs=TTL_SECS)
    ids = [row["id"] for row in rows]
    keepalive = KeepAlive(controller, ids)
    try:
        reply = controller.exec_command(ids[0], args, timeout_secs)
    finally:
        keepalive.stop()
        children.remove(controller, ids)
    finish(reply)
