"""Fork warmed sandboxes in milliseconds: the public names of the SDK, each imported on first use.

    from forkd import Controller, Sandbox, fork_map

Only the standard library is needed; `AsyncController` also needs httpx (`pip install 'forkd[async]'`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkd.client.aio import AsyncController
    from forkd.client.controller import BranchMode, Controller
    from forkd.client.failures import ConnectionFailed, ControllerError
    from forkd.client.fork_map import ForkResult, fork_map
    from forkd.client.sandbox import CommandResult, Sandbox

__version__ = "0.6.0"
__all__ = [
    "AsyncController",
    "BranchMode",
    "CommandResult",
    "ConnectionFailed",
    "Controller",
    "ControllerError",
    "ForkResult",
    "Sandbox",
    "__version__",
    "fork_map",
]

# The daemon, the CLI and the engines import this package too and need none of the client.
_HOMES = {
    "AsyncController": "forkd.client.aio",
    "BranchMode": "forkd.client.controller",
    "CommandResult": "forkd.client.sandbox",
    "ConnectionFailed": "forkd.client.failures",
    "Controller": "forkd.client.controller",
    "ControllerError": "forkd.client.failures",
    "ForkResult": "forkd.client.fork_map",
    "Sandbox": "forkd.client.sandbox",
    "fork_map": "forkd.client.fork_map",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forkd' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
