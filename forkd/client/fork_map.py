"""`fork_map`: one child per input, all forked from the same warmed state, results in input order.

Owns the children it makes, from spawn to kill. What is sent to them is made in `remote_code`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forkd.client.controller import Controller
from forkd.client.failures import ConnectionFailed, ControllerError
from forkd.client.remote_code import Answer, answer, program
from forkd.client.sandbox import kill_if_there

DEFAULT_PARALLEL = 32
# How long the daemon keeps a child whose caller vanished, beyond the time its work may take.
SPARE_TTL_SECS = 60


@dataclass(frozen=True, slots=True)
class ForkResult:
    """What one child made of its input."""

    input: Any
    value: Any = None
    error: str | None = None
    sandbox_id: str | None = None
    ms: float = 0.0
    traceback: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> Any:
        """The value, or RuntimeError with what the child raised."""
        if self.error is not None:
            trace = f"\n{self.traceback}" if self.traceback else ""
            raise RuntimeError(f"{self.error} (input {self.input!r}){trace}")
        return self.value


def fork_map(
    code_or_fn: str | Callable[[Any], Any],
    inputs: Iterable[Any],
    *,
    tag: str,
    controller: Controller | None = None,
    max_parallel: int | None = None,
    timeout: float = 30,
) -> list[ForkResult]:
    """Fork one child of snapshot `tag` per input, run the code or function in each, gather, clean up.

    >>> [r.value for r in fork_map("sum(range(input))", [3, 4], tag="numpy")]
    [3, 6]

    `code_or_fn` is source with `input` bound, whose last expression is the result; or a plain function of one
    argument that imports what it uses. Inputs and results travel as JSON. What goes wrong in one child is its
    `error`; only a first spawn that fails (nothing ran yet) raises.
    """
    inputs = list(inputs)
    made = program(code_or_fn)
    jobs = [Job(value, made.expression(i, value)) for i, value in enumerate(inputs)]
    size = checked_parallel(max_parallel)
    if not jobs:
        return []
    controller = controller or Controller.local()
    results: list[ForkResult] = []
    with ThreadPoolExecutor(min(size, len(jobs)), thread_name_prefix="forkd-map") as pool:
        for start in range(0, len(jobs), size):
            wave = jobs[start : start + size]
            try:
                with _Children(controller, tag, len(wave), timeout) as children:
                    results += pool.map(children.run, wave, children.ids)
            except (ControllerError, ConnectionFailed) as e:
                if not results:
                    raise
                results += [ForkResult(job.input, error=f"not forked: {e}") for job in wave]
    return results


@dataclass(frozen=True, slots=True)
class Job:
    input: Any
    expression: str

    def result(self, said: Answer, sandbox_id: str, started: float) -> ForkResult:
        ms = (time.perf_counter() - started) * 1000
        return ForkResult(self.input, said.value, said.error, sandbox_id, ms, said.traceback)


def checked_parallel(max_parallel: int | None) -> int:
    if max_parallel is None:
        return DEFAULT_PARALLEL
    if max_parallel < 1:
        raise ValueError(f"max_parallel is {max_parallel}; at least one child has to run")
    return max_parallel


def ttl_secs(timeout: float) -> int:
    return math.ceil(timeout) + SPARE_TTL_SECS


def could_not_kill(sandbox_id: str, e: Exception) -> None:
    print(
        f"forkd: could not kill sandbox {sandbox_id}: {e}; remove it with: forkd kill {sandbox_id}",
        file=sys.stderr,
    )


class _Children:
    """A wave of children: each is killed as soon as its work is done, and all at the end whatever happens."""

    def __init__(self, controller: Controller, tag: str, n: int, timeout: float) -> None:
        self._controller = controller
        self._timeout = timeout
        rows = controller.spawn_sandboxes(tag, n=n, ttl_secs=ttl_secs(timeout))
        self.ids = [str(row["id"]) for row in rows]
        self._alive = set(self.ids)
        self._lock = threading.Lock()  # guards _alive

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *exc: object) -> None:
        for sandbox_id in self.ids:
            self._kill(sandbox_id)

    def run(self, job: Job, sandbox_id: str) -> ForkResult:
        started = time.perf_counter()
        try:
            reply = self._controller.eval_code(sandbox_id, job.expression, timeout_secs=self._timeout)
            return job.result(answer(reply), sandbox_id, started)
        except (ControllerError, ConnectionFailed) as e:
            return job.result(Answer(error=str(e)), sandbox_id, started)
        finally:
            self._kill(sandbox_id)

    def _kill(self, sandbox_id: str) -> None:
        with self._lock:
            if sandbox_id not in self._alive:
                return
            self._alive.remove(sandbox_id)
        try:
            kill_if_there(self._controller, sandbox_id)
        except (ControllerError, ConnectionFailed) as e:
            could_not_kill(sandbox_id, e)
