"""Keeps sandboxes with a time to live alive for as long as their owner's process is.

A process that dies by any means stops touching, and the daemon removes what it had.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from forkd.client.controller import Controller
from forkd.client.failures import ConnectionFailed, ControllerError

TTL_SECS = 60


class KeepAlive:
    """A daemon thread that touches each id three times per time to live; `gone` is set when none is left."""

    def __init__(self, controller: Controller, ids: Iterable[str], ttl_secs: float = TTL_SECS) -> None:
        self.gone = threading.Event()
        self._controller = controller
        self._ids = list(ids)
        self._period_secs = ttl_secs / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forkd-keepalive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._period_secs):
            self._ids = [sandbox_id for sandbox_id in self._ids if self._touch(sandbox_id)]
            if not self._ids:
                self.gone.set()
                return

    def _touch(self, sandbox_id: str) -> bool:
        if self._stop.is_set():
            return True
        try:
            return self._controller.touch(sandbox_id).get("state") != "dead"
        except ControllerError as e:
            return e.status not in (404, 409)
        except ConnectionFailed:
            return True  # a daemon that restarts finds its sandboxes again, and we find it
