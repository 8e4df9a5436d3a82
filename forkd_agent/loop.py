"""One thread, one epoll: what is readable, what is due, what comes next.

`selectors` is not used: it folds a hang-up into "readable", and an unattached
virtio port hangs up for as long as nobody is there. Edge-triggered watching
turns that into one event, so an idle guest uses no CPU.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

IN = select.EPOLLIN
OUT = select.EPOLLOUT
HUP = select.EPOLLHUP
EDGE = select.EPOLLET

_BATCH = 64


class Timer:
    """A callback at a moment of the monotonic clock, which a restored guest continues."""

    __slots__ = ("due", "fn")

    def __init__(self, due: float, fn: Callable[[], None]) -> None:
        self.due = due
        self.fn = fn


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._soon: list[Callable[[], None]] = []
        self._timers: set[Timer] = set()

    @property
    def load(self) -> int:
        """How many files are watched."""
        return len(self._watched)

    def watch(self, fd: int, events: int, fn: Callable[[int], None]) -> None:
        self._epoll.register(fd, events)
        self._watched[fd] = fn

    def unwatch(self, fd: int) -> None:
        """Safe to call twice. Must come before the close: a number may be reused at once."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` at the end of this turn, after every ready file had its share."""
        self._soon.append(fn)

    def later(self, seconds: float, fn: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, fn)
        self._timers.add(timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        if timer is not None:
            self._timers.discard(timer)

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        for fd, events in self._epoll.poll(self._patience(), _BATCH):
            fn = self._watched.get(fd)
            if fn is not None:
                fn(events)
        if self._timers:
            self._fire()
        soon, self._soon = self._soon, []
        for call in soon:
            call()

    def _patience(self) -> float:
        if self._soon:
            return 0
        if not self._timers:
            return -1
        return max(0.0, min(t.due for t in self._timers) - time.monotonic())

    def _fire(self) -> None:
        now = time.monotonic()
        for timer in [t for t in self._timers if t.due <= now]:
            self._timers.discard(timer)
            timer.fn()
