"""The verbs about images: build, ls, rm. Images are built here, not by the daemon, which only boots them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import forkd
from forkd.cli import output
from forkd.cli.session import Refused, data_dir
from forkd.errors import BadName, NoImage
from forkd.names import ImageName

if TYPE_CHECKING:
    from forkd.models import Image

app = typer.Typer(no_args_is_help=True, help="Build images from recipes, and list or remove them.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("build")
def build_(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A folder with a recipe.toml, or a recipe's name.")],
    kernel: Annotated[Path | None, typer.Option(help="Use this kernel file.", dir_okay=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Build even if nothing changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build an image: kernel, initrd and root filesystem. Unchanged recipes come from the cache.

    \b
    forkd image build python-numpy
    forkd image build ./my-recipe --kernel ./vmlinux
    """
    made = build(find_recipe(recipe), images_dir(ctx), kernel=kernel, force=force)
    output.as_json(_shape(made)) if as_json else print(made.name)


@app.command("ls")
def list_(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List images."""
    from forkd.images import list_images

    rows = [_shape(image) for image in list_images(images_dir(ctx))]
    if as_json:
        output.as_json(rows)
    elif not rows:
        output.say("no images; `forkd image build python-numpy` makes one")
    else:
        cells = (
            (
                r["name"],
                r["key"][:12],
                output.size(r["disk_bytes"]),
                r["vcpus"],
                f"{r['memory_mib']} MiB",
                age,
            )
            for r in rows
            for age in [output.age(r["created_at_unix"])]
        )
        output.table(("NAME", "KEY", "DISK", "VCPUS", "MEMORY", "AGE"), cells)


@app.command()
def rm(ctx: typer.Context, names: Annotated[list[str], typer.Argument(help="Which ones.")]) -> None:
    """Remove images. Snapshots made from them stay."""
    from forkd.images import remove_image

    for name in names:
        ImageName(name)
    for name in names:
        remove_image(images_dir(ctx), name)
        print(f"{output.TICK} {name}")


def images_dir(ctx: typer.Context) -> Path:
    from forkd.config import load

    return load({"data_dir": data_dir(ctx)}).images


def find_recipe(text: str) -> Path:
    """The folder of a recipe given by path or by bare name."""
    given = Path(text)
    if (given / "recipe.toml").is_file():
        return given
    if given.name == "recipe.toml" and given.is_file():
        return given.parent
    try:
        name = ImageName(text).value
    except BadName:
        raise Refused(f"no recipe.toml in {text}", hint="give the folder that holds it") from None
    package = Path(forkd.__file__).parent
    places = [Path("recipes"), package.parent / "recipes", package / "recipes"]
    for place in places:
        if (place / name / "recipe.toml").is_file():
            return place / name
    known = sorted({p.parent.name for place in places for p in place.glob("*/recipe.toml")})
    raise Refused(f"no recipe named {name}", hint=f"recipes here: {', '.join(known) or 'none'}")


def build(folder: Path, into: Path, *, kernel: Path | None = None, force: bool = False) -> Image:
    from forkd import images

    recipe = images.load_recipe(folder)
    with output.Activity(f"image {recipe.name}") as progress:
        return images.build(recipe, into, kernel=kernel, progress=progress, force=force)


def ensure(name: str, into: Path) -> None:
    """Build an image by its recipe's name unless there is one."""
    from forkd.images import find_image

    try:
        find_image(into, name)
    except NoImage:
        build(find_recipe(name), into)


def _shape(image: Image) -> dict[str, Any]:
    return {
        "name": image.name,
        "key": image.key,
        "kernel": str(image.kernel),
        "initrd": str(image.initrd),
        "rootfs": str(image.rootfs),
        "disk_bytes": image.disk_bytes,
        "vcpus": image.machine.vcpus,
        "memory_mib": image.machine.memory_mib,
        "created_at_unix": image.created_at_unix,
    }
