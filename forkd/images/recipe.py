"""A recipe: what goes into an image, read from `recipe.toml` and checked once.

Owns the schema and its rules. Values leave here as data that is safe to hand
to programs as arguments; nothing is built and nothing is executed here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from forkd.errors import BadField, BadName
from forkd.models import Machine
from forkd.names import ImageName

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
# Name, extras, versions. No URL and no path: those would run the package's own build code on the host.
_VERSION = r"\s*(?:===|==|>=|<=|~=|!=|<|>)\s*[A-Za-z0-9.*+!_-]+\s*"
_REQUIREMENT = re.compile(
    rf"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._, -]+\])?(?:{_VERSION}(?:,{_VERSION})*)?"
)
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# /init mounts over these, so what an image puts there would never be seen.
_HIDDEN = ("/dev", "/proc", "/run", "/sys", "/tmp")

_SCHEMA: dict[str, set[str] | None] = {  # a section's keys; None: any key
    "machine": {"vcpus", "memory_mib", "disk_mib"},
    "packages": {"debian", "pip"},
    "files": None,
    "env": None,
    "warmup": {"script"},
    "source": {"rootfs"},
    "kernel": {"package"},
}


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    description: str = ""
    machine: Machine = field(default_factory=Machine)
    disk_mib: int = 1024
    debian: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)  # path in the guest -> file on the host
    env: dict[str, str] = field(default_factory=dict)
    warmup: str = ""
    source: Path | None = None  # a rootfs tar or folder instead of Debian packages
    kernel_package: str | None = None


def load_recipe(path: Path) -> Recipe:
    """Read `recipe.toml`, given as the file or as the folder that holds it."""
    path = path / "recipe.toml" if path.is_dir() else path
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise BadField("recipe", f"cannot read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadField("recipe", f"{path} is not TOML: {e}") from e
    return parse_recipe(data, path.parent.resolve())


def parse_recipe(data: dict[str, Any], folder: Path) -> Recipe:
    """Check every value. `folder`, already resolved, is where the recipe's files are."""
    sections = {name: _section(data, name) for name in _SCHEMA}
    for key in data:
        if key not in _SCHEMA and key not in ("name", "description"):
            raise BadField(key, "is not a key of a recipe", hint=f"sections are: {', '.join(_SCHEMA)}")
    machine, packages = sections["machine"], sections["packages"]
    recipe = Recipe(
        name=_name(data),
        description=_text("description", data.get("description", "")),
        machine=Machine(
            vcpus=_number("machine.vcpus", machine.get("vcpus", 1), 1, 16),
            memory_mib=_number("machine.memory_mib", machine.get("memory_mib", 256), 64, 65536),
        ),
        disk_mib=_number("machine.disk_mib", machine.get("disk_mib", 1024), 8, 1 << 20),
        debian=_list("packages.debian", packages.get("debian", []), _package),
        pip=_list("packages.pip", packages.get("pip", []), _requirement),
        files=dict(_file(guest, host, folder) for guest, host in sections["files"].items()),
        env=dict(_variable(key, value) for key, value in sections["env"].items()),
        warmup=_warmup(sections["warmup"], folder),
        source=_source(sections["source"], folder),
        kernel_package=_kernel_package(sections["kernel"]),
    )
    if recipe.source is not None and recipe.debian:
        raise BadField("packages.debian", "cannot be added to a ready root filesystem", hint="drop one")
    if recipe.source is None and not recipe.debian:
        raise BadField("packages.debian", "is empty", hint='say debian = ["python3"], or [source] rootfs')
    return recipe


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name, {})
    if not isinstance(section, dict):
        raise BadField(name, "must be a section")
    known = _SCHEMA[name]
    for key in section:
        if known is not None and key not in known:
            raise BadField(f"{name}.{key}", "is not a key", hint=f"keys are: {', '.join(sorted(known))}")
    return section


def _name(data: Mapping[str, Any]) -> str:
    if "name" not in data:
        raise BadField("name", "is missing")
    try:
        return ImageName(data["name"]).value
    except BadName as e:
        raise BadField("name", str(e), hint=e.hint) from e


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadField(key, "must be text")
    if any(char in value for char in "\n\r\0"):
        raise BadField(key, "must be one line without NUL")
    return value


def _number(key: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadField(key, "must be a whole number")
    if not low <= value <= high:
        raise BadField(key, f"must be from {low} to {high}")
    return value


def _list(key: str, value: object, check: Callable[[str, str], str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise BadField(key, "must be a list of texts")
    return tuple(check(key, _text(key, item)) for item in value)


def _package(key: str, name: str) -> str:
    # apt reads a trailing "-" as "remove this one".
    if not _PACKAGE.fullmatch(name) or name.endswith("-"):
        raise BadField(key, f"{name!r} is not a Debian package name")
    return name


def _requirement(key: str, text: str) -> str:
    if not _REQUIREMENT.fullmatch(text):
        raise BadField(key, f"{text!r} is not a requirement", hint="say a name and versions: numpy>=1.26,<3")
    return text


def _variable(key: str, value: object) -> tuple[str, str]:
    if not _ENV_KEY.fullmatch(key):
        raise BadField(f"env.{key}", "is not a variable name")
    return key, _text(f"env.{key}", value)


def _file(guest: str, host: object, folder: Path) -> tuple[str, Path]:
    key = f"files.{guest}"
    path = PurePosixPath(_text(key, guest))
    plain = path.parts[:1] == ("/",) and str(path) == guest and ".." not in path.parts
    if not plain or len(path.parts) < 2 or any(len(part.encode()) > 255 for part in path.parts):
        raise BadField(key, "must be an absolute, plain path in the guest")
    if any(path.is_relative_to(mount) for mount in _HIDDEN):
        raise BadField(key, f"would be hidden: the guest mounts over {', '.join(_HIDDEN)}")
    found = _beneath(key, host, folder)
    if not found.is_file():
        raise BadField(key, f"{host!r} is not a regular file")
    return guest, found


def _warmup(section: Mapping[str, Any], folder: Path) -> str:
    if "script" not in section:
        return ""
    found = _beneath("warmup.script", section["script"], folder)
    try:
        return found.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise BadField("warmup.script", f"cannot read {section['script']!r}: {e}") from e


def _source(section: Mapping[str, Any], folder: Path) -> Path | None:
    if "rootfs" not in section:
        return None
    found = _beneath("source.rootfs", section["rootfs"], folder)
    if not (found.is_file() or found.is_dir()):
        raise BadField("source.rootfs", f"{section['rootfs']!r} is neither a tar nor a folder")
    return found


def _kernel_package(section: Mapping[str, Any]) -> str | None:
    if "package" not in section:
        return None
    name = _package("kernel.package", _text("kernel.package", section["package"]))
    if not name.startswith("linux-image-"):
        raise BadField("kernel.package", f"{name!r} is not a kernel", hint="try linux-image-cloud-amd64")
    return name


def _beneath(key: str, value: object, folder: Path) -> Path:
    """The file that `value` names, if it really is inside the recipe's folder."""
    text = _text(key, value)
    if not text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise BadField(key, f"{text!r} must be a path inside the recipe's folder")
    try:
        found = (folder / text).resolve(strict=True)
    except (OSError, RuntimeError) as e:  # RuntimeError: a loop of symlinks, up to Python 3.12
        raise BadField(key, f"{text!r} cannot be found: {e}") from e
    if not found.is_relative_to(folder) or found == folder:
        raise BadField(key, f"{text!r} leads out of the recipe's folder")
    return found
