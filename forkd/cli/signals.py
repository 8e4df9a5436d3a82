"""Turns the signals that end a command into exceptions, so that `finally` blocks run for all of them."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came; the exit code is the shell's for it."""


def raise_when_told_to_end() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _once)


def _once(number: int, _frame: FrameType | None) -> None:
    # What is being cleaned up now must not be interrupted by the same request again.
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Terminated(128 + number)
