"""The command `forkd-controller`: flags to a Config, refusals to exit code 2.

Heavy imports wait until a command needs them, so that `--version` and usage
errors answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forkd import __version__, config
from forkd.errors import BadField, ForkdError

if TYPE_CHECKING:
    from forkd.daemon.ports import MakeRuntime, RuntimeApi

_REFUSED = 2


def main(argv: Sequence[str] | None = None, make_runtime: MakeRuntime | None = None) -> int:
    options = vars(_parser().parse_args(argv))
    try:
        if options.pop("command") == "openapi":
            return _print_openapi()
        return _serve(options, make_runtime or _runtime)
    except ForkdError as e:
        hint = f" ({e.hint})" if e.hint else ""
        print(f"forkd-controller: {e}{hint}", file=sys.stderr)
        return _REFUSED


def _serve(options: dict[str, Any], make_runtime: MakeRuntime, env: Mapping[str, str] = os.environ) -> int:
    for name in ("tls_cert", "tls_key"):
        if options.pop(name) or env.get(f"FORKD_{name.upper()}"):
            raise BadField(name, "TLS is not supported yet", hint="put a TLS proxy in front")
    options.pop("prewarm_scratch_dir")
    branch_cap = _branch_cap(options.pop("branch_concurrency"), env)
    settings = config.load(options, env)
    from forkd.daemon.server import serve

    return serve(settings, make_runtime, branch_cap=branch_cap)


def _branch_cap(flag: str | None, env: Mapping[str, str]) -> int:
    given = flag if flag is not None else env.get("FORKD_BRANCH_CONCURRENCY", "4")
    if not given.isascii() or not given.isdigit() or int(given) == 0:
        raise BadField("branch_concurrency", f"{given!r} is not a number above 0")
    return int(given)


def _runtime(settings: config.Config) -> RuntimeApi:
    from forkd.runtime import Runtime

    return Runtime(settings)


def _print_openapi() -> int:
    from forkd.daemon.app import routed

    print(json.dumps(routed().openapi(), indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forkd-controller", description="The forkd daemon.")
    parser.add_argument("--version", action="version", version=f"forkd-controller {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("openapi", help="print the OpenAPI document")
    serve = commands.add_parser(
        "serve",
        help="run the daemon",
        description="Flags win over FORKD_* variables, those over config.toml.",
    )
    for flag, metavar, text in _FLAGS:
        serve.add_argument(flag, metavar=metavar, help=text)
    serve.add_argument(
        "--image-root",
        dest="image_roots",
        metavar="DIR",
        action="append",
        help="where a kernel or rootfs may be taken from by path (repeatable)",
    )
    serve.add_argument(
        "--allow-tcg",
        action=argparse.BooleanOptionalAction,
        help="let accel auto fall back to slow emulation",
    )
    return parser


_FLAGS = (
    ("--bind", "ADDR:PORT", f"TCP address, '' for the Unix socket alone (default {config.DEFAULT_BIND})"),
    ("--data-dir", "DIR", "where everything is kept"),
    ("--state", "FILE", "the journal (default DATA_DIR/journal.db)"),
    ("--snapshot-root", "DIR", "where snapshots are kept (default DATA_DIR/snapshots)"),
    ("--audit-log", "FILE", "one line per request (default DATA_DIR/audit.log)"),
    ("--token-file", "FILE", "the bearer token; needed to listen beyond loopback"),
    ("--accel", "auto|kvm|tcg", "how microVMs run"),
    ("--standby", "N", "loaded VMMs kept ready per snapshot"),
    ("--parallelism", "N", "starts at once (default: the number of cores)"),
    ("--max-sandboxes", "N", "sandboxes alive at once"),
    ("--idle-exit-secs", "SECS", "leave after this long without sandboxes and requests (0: never)"),
    ("--tls-cert", "FILE", "not supported yet"),
    ("--tls-key", "FILE", "not supported yet"),
    ("--prewarm-scratch-dir", "DIR", "accepted for compatibility; has no effect"),
    ("--branch-concurrency", "N", "reported in the metrics (default 4)"),
)


if __name__ == "__main__":
    sys.exit(main())
