"""The verbs about snapshots: create, ls, info, rm, and the reference system's flat names for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forkd.cli import output
from forkd.cli.session import Refused, connect
from forkd.models import Accel
from forkd.names import Tag

app = typer.Typer(
    invoke_without_command=True, help="Capture warmed parents, and list, inspect or remove them."
)

TagOption = Annotated[str | None, typer.Option("--tag", help="Name of the snapshot to make.", metavar="TAG")]
ImageOption = Annotated[str | None, typer.Option(help="Boot this image (`forkd image ls`).")]
KernelOption = Annotated[
    Path | None, typer.Option(help="Boot this kernel, with --rootfs.", envvar="FORKD_KERNEL")
]
RootfsOption = Annotated[
    Path | None, typer.Option(help="Root filesystem (ext4) for --kernel.", envvar="FORKD_ROOTFS")
]
AccelOption = Annotated[Accel | None, typer.Option(help="auto takes KVM if it works; tcg is slow emulation.")]
VcpusOption = Annotated[int | None, typer.Option(min=1, help="Virtual CPUs.")]
MemoryOption = Annotated[int | None, typer.Option("--memory-mib", "--mem-size-mib", min=1, help="Guest RAM.")]
WaitOption = Annotated[int | None, typer.Option(min=0, help="How long the guest may take to boot.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CascadeOption = Annotated[bool, typer.Option("--cascade", help="Remove what was branched from it too.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Remove it even if others need it.")]


@app.callback()
def flat(
    ctx: typer.Context,
    tag: TagOption = None,
    image: ImageOption = None,
    kernel: KernelOption = None,
    rootfs: RootfsOption = None,
    accel: AccelOption = None,
    vcpus: VcpusOption = None,
    memory_mib: MemoryOption = None,
    boot_wait_secs: WaitOption = None,
) -> None:
    """Capture warmed parents, and list, inspect or remove them.

    Without a verb this is `create`.
    """
    if ctx.invoked_subcommand is None:
        create(ctx, tag, image, kernel, rootfs, accel, vcpus, memory_mib, boot_wait_secs)


@app.command()
def create(
    ctx: typer.Context,
    tag: TagOption = None,
    image: ImageOption = None,
    kernel: KernelOption = None,
    rootfs: RootfsOption = None,
    accel: AccelOption = None,
    vcpus: VcpusOption = None,
    memory_mib: MemoryOption = None,
    boot_wait_secs: WaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Boot a parent, warm it, and capture it.

    \b
    forkd snapshot create --tag numpy --image python-numpy
    forkd snapshot create --tag mine --kernel ./vmlinux --rootfs ./root.ext4 --memory-mib 512
    """
    if tag is None:
        raise typer.BadParameter("name the snapshot", param_hint="--tag")
    if (image is None) == (kernel is None and rootfs is None) or (kernel is None) != (rootfs is None):
        raise typer.BadParameter("give either --image, or --kernel and --rootfs")
    with output.Activity(f"snapshot {Tag(tag)}"):
        made = connect(ctx).create_snapshot(
            tag,
            image=image,
            kernel=kernel and kernel.absolute(),
            rootfs=rootfs and rootfs.absolute(),
            accel=accel and accel.value,
            vcpus=vcpus,
            memory_mib=memory_mib,
            boot_wait_secs=boot_wait_secs,
        )
    if as_json:
        output.as_json(made)
    else:
        _fields(made, ("tag", "dir", "accel"))


@app.command("ls")
def list_(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List snapshots."""
    rows = connect(ctx).list_snapshots()
    if as_json:
        output.as_json(rows)
    elif not rows:
        output.say("no snapshots; `forkd snapshot create` makes one")
    else:
        output.table(
            ("TAG", "STATUS", "ISOLATION", "ACCEL", "VCPUS", "MEMORY", "AGE", "WARNING"), map(_row, rows)
        )


@app.command()
def info(
    ctx: typer.Context, tag: Annotated[str, typer.Argument(help="Which one.")], as_json: JsonOption = False
) -> None:
    """Show one snapshot: its files, ancestors and dependents."""
    found = connect(ctx).snapshot_info(str(Tag(tag)))
    output.as_json(found) if as_json else _fields(found, found)


@app.command()
def rm(
    ctx: typer.Context,
    tags: Annotated[list[str], typer.Argument(help="Which ones.")],
    cascade: CascadeOption = False,
    force: ForceOption = False,
) -> None:
    """Remove snapshots."""
    from forkd.client.failures import ControllerError

    if cascade and force:
        raise typer.BadParameter("choose one of --cascade and --force")
    for tag in tags:
        Tag(tag)
    controller = connect(ctx)
    failed = 0
    for tag in tags:
        try:
            controller.delete_snapshot(tag, cascade=cascade, force=force)
            print(f"{output.TICK} {tag}")
        except ControllerError as e:
            failed += 1
            print(f"{output.CROSS} {tag}")
            output.error(e.problem, e.hint)
    if failed:
        raise Refused(f"{failed} of {len(tags)} snapshots were not removed")


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    memory = f"{row['memory_mib']} MiB" if row.get("memory_mib") else None
    names = ("tag", "status", "isolation", "accel", "vcpus")
    return (
        *(row.get(name) for name in names),
        memory,
        output.age(row.get("created_at_unix")),
        row.get("warning"),
    )


def _fields(found: dict[str, Any], names: Any) -> None:
    for name in names:
        if name in found:
            value = found[name]
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{name + ':':<24}{output.shown(shown)}")
