"""Named points at which a test makes the daemon die, to prove that nothing is left behind.

`FORKD_CRASH_AT=spawn.started` kills the process there, as kill -9 would. Unset, a point costs one lookup.
"""

from __future__ import annotations

import os
import signal

_CRASH_AT = os.environ.get("FORKD_CRASH_AT")


def point(name: str) -> None:
    if name == _CRASH_AT:
        os.kill(os.getpid(), signal.SIGKILL)
