"""One fleet per Idempotency-Key: the first request runs, its twins get its answer.

Held in memory: a restarted daemon has forgotten the keys. Failures are not
remembered, so a retry after one is a fresh try.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forkd.errors import BadField, Busy, KeyReused

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Answer]):
    fingerprint: str
    task: asyncio.Task[Answer]
    born: float


class Replays(Generic[Answer]):
    def __init__(self, size: int, keep_secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._keep_secs = keep_secs
        self._clock = clock
        self._entries: OrderedDict[str, _Entry[Answer]] = OrderedDict()

    async def once(
        self, key: str, fingerprint: str, run: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> tuple[Answer, bool]:
        """The answer, and whether it is a repetition."""
        entry = self._known(key)
        repeated = entry is not None
        if entry is None:
            entry = self._begin(key, fingerprint, run)
        elif entry.fingerprint != fingerprint:
            raise KeyReused(
                "this Idempotency-Key was used for a different request", hint="take a new key per request"
            )
        # Shielded: the twins of a client that went away still want the answer.
        return await asyncio.shield(entry.task), repeated

    def _known(self, key: str) -> _Entry[Answer] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.task.done() and self._clock() - entry.born > self._keep_secs:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return entry

    def _begin(
        self, key: str, fingerprint: str, run: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> _Entry[Answer]:
        if len(self._entries) >= self._size:
            oldest = next((k for k, e in self._entries.items() if e.task.done()), None)
            if oldest is None:
                raise Busy("too many requests with an Idempotency-Key are under way", hint="try again")
            del self._entries[oldest]
        entry = _Entry(fingerprint, asyncio.get_running_loop().create_task(run()), self._clock())
        self._entries[key] = entry

        def settle(task: asyncio.Task[Answer]) -> None:
            failed = task.cancelled() or task.exception() is not None
            if failed and self._entries.get(key) is entry:
                del self._entries[key]

        entry.task.add_done_callback(settle)
        return entry


def checked_key(text: str) -> str:
    if not 1 <= len(text) <= 255 or not text.isascii() or not text.isprintable():
        raise BadField("Idempotency-Key", "must be 1 to 255 printable ASCII characters")
    return text
