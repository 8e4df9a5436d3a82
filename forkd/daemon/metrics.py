"""Figures for Prometheus, under the reference system's names and some of our own.

Gauges are read from the runtime when somebody asks; only what passes by
(requests, latencies) is counted here. Keeps its own registry, so that several
daemons in one process do not meet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from forkd.daemon.ports import RuntimeApi
from forkd.models import SandboxState

CONTENT_TYPE = "text/plain; version=0.0.4"
DEFAULT_BRANCH_CAP = 4

_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_WHOLE = re.compile(rb"\.0$", re.MULTILINE)


class Metrics:
    def __init__(self, runtime: RuntimeApi, version: str, branch_cap: int = DEFAULT_BRANCH_CAP) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_RuntimeGauges(runtime, version, branch_cap))
        make = {"registry": self._registry}
        self.spawn_seconds = Histogram(
            "forkd_spawn_seconds", "Request to all children awake.", buckets=_BUCKETS, **make
        )
        self.exec_seconds = Histogram("forkd_exec_seconds", "One exec.", buckets=_BUCKETS, **make)
        self.eval_seconds = Histogram("forkd_eval_seconds", "One eval.", buckets=_BUCKETS, **make)
        self._requests = Counter(
            "forkd_requests_total", "Answered requests.", ["method", "route", "status"], **make
        )
        self.lost_audit_lines = Counter(
            "forkd_lost_audit_lines_total", "Audit lines that could not be written.", **make
        )
        self.suppressed_audit_lines = Counter(
            "forkd_suppressed_audit_lines_total", "Audit lines left out in a flood of bad tokens.", **make
        )
        self.in_flight = 0
        self.last_request = time.monotonic()

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is under way; what the idle exit looks at."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.last_request = time.monotonic()

    def answered(self, scope: Scope, status: int) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        # The template, never the path: a client must not be able to make up series.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._requests.labels(method, route, str(status)).inc()

    def text(self) -> bytes:
        # Whole numbers without decimals, as the reference prints them.
        return _WHOLE.sub(b"", generate_latest(self._registry))


class _RuntimeGauges(Collector):
    def __init__(self, runtime: RuntimeApi, version: str, branch_cap: int) -> None:
        self._runtime = runtime
        self._version = version
        self._branch_cap = branch_cap

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not ask a runtime that has not started

    def collect(self) -> Iterable[Metric]:
        counts = self._runtime.counts()
        sandboxes: dict[tuple[str, str], int] = counts["sandboxes"]
        alive = sum(count for (_, state), count in sandboxes.items() if state != SandboxState.DEAD)
        yield _gauge("forkd_snapshots_total", "Snapshots there are.", counts["snapshots"])
        yield _gauge("forkd_sandboxes_active", "Sandboxes that are not dead.", alive)
        yield _gauge("forkd_branches_in_flight", "Branches being taken.", 0)
        yield _gauge("forkd_branch_concurrency_cap", "Branches that may be taken at once.", self._branch_cap)
        yield _gauge("forkd_standby", "Loaded VMMs kept ready.", counts["standby"])
        build = GaugeMetricFamily("forkd_build_info", "The daemon's version.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        by_state = GaugeMetricFamily("forkd_sandboxes", "Sandboxes.", labels=["engine", "state"])
        for (engine, state), count in sorted(sandboxes.items()):
            by_state.add_metric([str(engine), str(state)], count)
        yield by_state
        yield from _lost(counts)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _lost(counts: dict[str, Any]) -> Iterator[Metric]:
    for name, value in sorted(counts.items()):
        if name.startswith("lost_"):
            yield CounterMetricFamily(f"forkd_{name}", "Things that went missing unrecorded.", value=value)
