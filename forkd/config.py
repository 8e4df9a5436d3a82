"""One frozen Config, made once: defaults < file < environment < flags.

The file is `config.toml` in the data folder (or `FORKD_CONFIG`); its keys and
the flags are the field names below, the environment's are `FORKD_` + the name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forkd.errors import BadField
from forkd.models import Accel

DEFAULT_BIND = "127.0.0.1:8889"
DEFAULT_URL = f"http://{DEFAULT_BIND}"


def default_data_dir(env: Mapping[str, str] = os.environ) -> Path:
    if chosen := env.get("FORKD_DATA_DIR"):
        return Path(chosen)
    if base := env.get("XDG_DATA_HOME"):
        return Path(base) / "forkd"
    return Path(env.get("HOME", "/root")) / ".local/share/forkd"


@dataclass(frozen=True, slots=True)
class Config:
    data_dir: Path
    bind: str = DEFAULT_BIND  # "" listens on the Unix socket only
    token_file: Path | None = None
    audit_log: Path | None = None  # default: <data_dir>/audit.log
    state: Path | None = None  # the journal; default: <data_dir>/journal.db
    snapshot_root: Path | None = None  # default: <data_dir>/snapshots
    image_roots: tuple[Path, ...] = field(default=())  # where REST may take a kernel or rootfs by path
    allowed_hosts: tuple[str, ...] = field(default=())  # Host headers accepted beside loopback and `bind`
    accel: Accel = Accel.AUTO
    allow_tcg: bool = False  # may `auto` fall back to slow emulation?
    qemu: str = ""  # default: the best of the distribution's binaries
    standby: int = 0  # loaded VMMs kept ready per snapshot
    parallelism: int = 0  # 0: as many as there are cores
    max_sandboxes: int = 1000
    wake_timeout_secs: int = 30
    idle_exit_secs: int = 0  # 0: never; a private daemon leaves when nothing needs it

    @property
    def socket(self) -> Path:
        return self.data_dir / "forkd.sock"

    @property
    def journal_path(self) -> Path:
        return self.state or self.data_dir / "journal.db"

    @property
    def snapshots(self) -> Path:
        return self.snapshot_root or self.data_dir / "snapshots"

    @property
    def audit_path(self) -> Path:
        return self.audit_log or self.data_dir / "audit.log"

    @property
    def images(self) -> Path:
        return self.data_dir / "images"

    @property
    def run(self) -> Path:
        """One folder per live sandbox."""
        return self.data_dir / "run"

    @property
    def workers(self) -> int:
        return self.parallelism or len(os.sched_getaffinity(0))


def load(flags: Mapping[str, Any] | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """Merge the four sources. A flag of None means "not given"."""
    given = {k: v for k, v in (flags or {}).items() if v is not None}
    data_dir = Path(given.pop("data_dir", None) or default_data_dir(env)).absolute()
    merged: dict[str, Any] = {}
    path = Path(env["FORKD_CONFIG"]) if "FORKD_CONFIG" in env else data_dir / "config.toml"
    if "FORKD_CONFIG" in env or path.exists():
        merged |= _from_file(path)
    names = {f.name for f in fields(Config)} - {"data_dir"}
    merged |= {n: env[f"FORKD_{n.upper()}"] for n in names if f"FORKD_{n.upper()}" in env}
    merged |= given
    config = Config(data_dir)
    for name, value in merged.items():
        if name not in names:
            raise BadField(name, "is not a setting", hint=f"settings are: {', '.join(sorted(names))}")
        config = replace(config, **{name: _parsed(name, value)})
    return config


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise BadField("FORKD_CONFIG", f"cannot read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadField("FORKD_CONFIG", f"{path} is not TOML: {e}") from e


def _parsed(name: str, value: Any) -> Any:
    try:
        match name:
            case "token_file" | "audit_log" | "state" | "snapshot_root":
                return Path(value).absolute()
            case "image_roots":
                return tuple(Path(p).absolute() for p in _split(value))
            case "allowed_hosts":
                return tuple(str(h) for h in _split(value))
            case "accel":
                return Accel(value)
            case "allow_tcg":
                return _flag(value)
            case "bind" | "qemu":
                return str(value)
            case _:
                return _count(value)
    except (ValueError, TypeError) as e:
        raise BadField(name, f"{value!r} is not valid: {e}") from e


def _split(value: Any) -> list[Any]:
    return [part for part in value.split(":") if part] if isinstance(value, str) else list(value)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    match str(value).lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off" | "":
            return False
    raise ValueError("say true or false")


def _count(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("a number is meant")
    number = int(value)
    if number < 0:
        raise ValueError("must not be negative")
    return number
