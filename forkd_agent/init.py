"""PID 1 of a guest: starts the agent, then only reaps.

Run as a script. Imports next to nothing before the fork, so that the agent's imports
are not paid twice, and does no work that could fail.
"""

from __future__ import annotations

import os
import signal
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    # A script's own folder comes first on the path and would let names like `files` be imported by accident.
    sys.path[0] = os.path.dirname(FOLDER)
    # The kernel drops every signal PID 1 has no handler for; Python's SIGINT handler is the one there is.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    agent = os.fork()
    if agent == 0:
        _become_agent()
    status = _reap_until(agent)
    sys.stdout.write(f"forkd-init: agent died ({_how(status)})\n")
    sys.stdout.flush()
    from forkd_agent import kernel

    kernel.reset_machine()
    signal.pause()  # PID 1 may not return while the reset is under way: that is a kernel panic


def _become_agent() -> None:
    try:
        os.setsid()
        from forkd_agent import main as agent

        agent.serve_guest()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def _reap_until(agent: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == agent:
            return status


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    main()
