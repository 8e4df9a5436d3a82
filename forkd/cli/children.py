"""Spawning and killing on behalf of a verb: children that were not reported to the user do not stay."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forkd.cli import output
from forkd.client.controller import Controller
from forkd.client.failures import ConnectionFailed, ControllerError

Json = dict[str, Any]
_KILLERS = 8


def spawn(controller: Controller, tag: str, n: int, **options: Any) -> tuple[list[Json], dict[str, float]]:
    """All n children; or, when the user interrupts before they are known, none."""
    key = uuid.uuid4().hex
    try:
        return controller.spawn_with_timing(tag, n, idempotency_key=key, **options)
    except (KeyboardInterrupt, SystemExit):
        # The daemon may have them already. The same key asks for the same children, not for more.
        output.say("forkd: interrupted; removing what was being spawned")
        rows, _ = controller.spawn_with_timing(tag, n, idempotency_key=key, **options)
        remove(controller, [row["id"] for row in rows])
        raise


def kill_each(controller: Controller, ids: Iterable[str]) -> list[tuple[str, Exception | None]]:
    """Kill them all, a few at a time; each id with what went wrong."""

    def kill(sandbox_id: str) -> tuple[str, Exception | None]:
        try:
            controller.kill_sandbox(sandbox_id)
        except (ControllerError, ConnectionFailed) as e:
            return sandbox_id, e
        return sandbox_id, None

    with ThreadPoolExecutor(_KILLERS) as pool:
        return list(pool.map(kill, ids))


def remove(controller: Controller, ids: Iterable[str]) -> None:
    """Make sure that they are gone; ids that could not be killed are named."""
    for sandbox_id, e in kill_each(controller, ids):
        if e is not None and getattr(e, "status", None) != 404:
            output.error(f"could not kill sandbox {sandbox_id}: {e}", f"forkd kill {sandbox_id}")
