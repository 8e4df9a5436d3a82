"""Every request the daemon understands, as data: one function a route, shared by both controllers.

Builds requests and reads replies; sends nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote, urlencode

from forkd.client.failures import BadReply, ControllerError

BranchMode = Literal["full", "diff", "live"]
"""How a BRANCH takes memory: all of it under pause, what changed, or all of it while the source runs."""

_IDEMPOTENT = frozenset({"GET", "PUT", "DELETE"})
_MARGIN_SECS = 10.0  # what the daemon may add to a time limit given for work in the guest
_SNAPSHOT_SECS = 540.0  # booting and warming a parent under emulation
_SECS_PER_CHILD = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    body: Any = None  # sent as JSON
    content: bytes | None = None  # sent as it is
    expects: type | None = None  # dict, list or bytes; None: nothing worth returning
    at_least_secs: float = 0.0  # the client's timeout is stretched to this
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def retry(self) -> bool:
        return self.method in _IDEMPOTENT or "Idempotency-Key" in self.headers

    def encoded(self, token: str | None) -> tuple[dict[str, str], bytes | None]:
        """Headers and body as they go out."""
        headers = dict(self.headers)
        data = self.content
        if self.body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(self.body).encode()
        elif data is not None:
            headers["Content-Type"] = "application/octet-stream"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers, data

    def result(self, status: int, body: bytes, url: str) -> Any:
        if not 200 <= status < 300:
            raise ControllerError(status, _parsed(body) if body else {}, url)
        if self.expects is None:
            return None
        if self.expects is bytes:
            return body
        value = _parsed(body)
        if not isinstance(value, self.expects):
            raise BadReply(status, value, url)
        return value


def checked_token(token: str | None) -> str | None:
    """The token as a header may carry it. The message never quotes it."""
    if token is None or not (trimmed := token.strip()):
        return None
    if not (trimmed.isascii() and trimmed.isprintable()):
        raise ValueError("the token holds characters that no HTTP header may carry; check FORKD_TOKEN")
    return trimmed


def healthz() -> Call:
    return Call("GET", "/healthz", expects=dict)


def version() -> Call:
    return Call("GET", "/version", expects=dict)


def host() -> Call:
    # It may boot a probe machine to find out what works.
    return Call("GET", "/v1/host", expects=dict, at_least_secs=120)


def images() -> Call:
    return Call("GET", "/v1/images", expects=list)


def snapshots() -> Call:
    return Call("GET", "/v1/snapshots", expects=list)


def create_snapshot(
    tag: str,
    *,
    image: str | None,
    kernel: str | None,
    rootfs: str | None,
    accel: str | None,
    vcpus: int | None,
    memory_mib: int | None,
    boot_wait_secs: int | None,
) -> Call:
    given = {
        "image": image,
        "kernel": kernel,
        "rootfs": rootfs,
        "accel": accel,
        "vcpus": vcpus,
        "memory_mib": memory_mib,
        "boot_wait_secs": boot_wait_secs,
    }
    body = {"tag": tag} | {k: v for k, v in given.items() if v is not None}
    at_least_secs = _SNAPSHOT_SECS + (boot_wait_secs or 0)
    return Call("POST", "/v1/snapshots", body, expects=dict, at_least_secs=at_least_secs)


def snapshot_info(tag: str) -> Call:
    return Call("GET", f"/v1/snapshots/{_part(tag)}/info", expects=dict)


def delete_snapshot(tag: str, *, cascade: bool, force: bool) -> Call:
    flags = {name: "true" for name, on in (("cascade", cascade), ("force", force)) if on}
    query = f"?{urlencode(flags)}" if flags else ""
    return Call("DELETE", f"/v1/snapshots/{_part(tag)}{query}")


def set_standby(tag: str, size: int) -> Call:
    return Call("PUT", f"/v1/snapshots/{_part(tag)}/standby", {"size": size}, at_least_secs=120)


def spawn(
    snapshot_tag: str,
    n: int,
    *,
    per_child_netns: bool = False,
    memory_limit_mib: int | None = None,
    prewarm: bool = False,
    live_fork: bool = False,
    hugepages: bool = False,
    ttl_secs: int | None = None,
    isolation: str | None = None,
    idempotency_key: str | None = None,
) -> Call:
    body: dict[str, Any] = {"snapshot_tag": snapshot_tag, "n": n, "per_child_netns": per_child_netns}
    if memory_limit_mib is not None:
        body["memory_limit_mib"] = memory_limit_mib
    # Flags travel only when set, so that daemons that do not know one still serve everybody else.
    body |= {
        name: True
        for name, on in (("prewarm", prewarm), ("live_fork", live_fork), ("hugepages", hugepages))
        if on
    }
    if ttl_secs is not None:
        body["ttl_secs"] = ttl_secs
    if isolation is not None:
        body["isolation"] = isolation
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    at_least_secs = 30 + _SECS_PER_CHILD * n if isinstance(n, int) else 0
    return Call("POST", "/v1/sandboxes", body, expects=list, at_least_secs=at_least_secs, headers=headers)


def sandboxes() -> Call:
    return Call("GET", "/v1/sandboxes", expects=list)


def sandbox(sandbox_id: str) -> Call:
    return Call("GET", f"/v1/sandboxes/{_part(sandbox_id)}", expects=dict)


def kill(sandbox_id: str) -> Call:
    return Call("DELETE", f"/v1/sandboxes/{_part(sandbox_id)}")


def branch(
    sandbox_id: str, tag: str | None, *, diff: bool, measure_diff: bool, mode: BranchMode | None, wait: bool
) -> Call:
    body: dict[str, Any] = {} if tag is None else {"tag": tag}
    if mode is not None:
        body["mode"] = mode
    elif diff:
        body["diff"] = True
    if measure_diff:
        body["measure_diff"] = True
    if not wait:
        body["wait"] = False
    return Call("POST", f"/v1/sandboxes/{_part(sandbox_id)}/branch", body, expects=dict)


def execute(
    sandbox_id: str,
    args: Sequence[str],
    timeout_secs: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Call:
    body: dict[str, Any] = {"args": list(args), "timeout_secs": timeout_secs}
    if env is not None:
        body["env"] = dict(env)
    if cwd is not None:
        body["cwd"] = cwd
    path = f"/v1/sandboxes/{_part(sandbox_id)}/exec"
    return Call("POST", path, body, expects=dict, at_least_secs=_stretched(timeout_secs))


def evaluate(sandbox_id: str, code: str, timeout_secs: float | None = None) -> Call:
    body: dict[str, Any] = {"code": code}
    if timeout_secs is not None:
        body["timeout_secs"] = timeout_secs
    path = f"/v1/sandboxes/{_part(sandbox_id)}/eval"
    return Call("POST", path, body, expects=dict, at_least_secs=_stretched(timeout_secs))


def ping(sandbox_id: str) -> Call:
    return Call("POST", f"/v1/sandboxes/{_part(sandbox_id)}/ping", expects=dict)


def touch(sandbox_id: str) -> Call:
    return Call("POST", f"/v1/sandboxes/{_part(sandbox_id)}/touch", expects=dict)


def stats(sandbox_id: str) -> Call:
    return Call("GET", f"/v1/sandboxes/{_part(sandbox_id)}/stats", expects=dict)


def read_file(sandbox_id: str, path: str) -> Call:
    query = urlencode({"path": path})
    return Call("GET", f"/v1/sandboxes/{_part(sandbox_id)}/files?{query}", expects=bytes)


def write_file(sandbox_id: str, path: str, data: bytes, mode: int | None) -> Call:
    query = urlencode({"path": path} | ({} if mode is None else {"mode": f"{mode}"}))
    return Call("PUT", f"/v1/sandboxes/{_part(sandbox_id)}/files?{query}", content=data)


def server_timing(header: str | None) -> dict[str, float]:
    """`running;dur=12.3, ready;dur=45.6` as milliseconds by name; what is not of that form is skipped."""
    found: dict[str, float] = {}
    for entry in (header or "").split(","):
        name, _, rest = entry.strip().partition(";")
        key, _, value = rest.partition("=")
        try:
            number = float(value)
        except ValueError:
            continue
        if name and key.strip() == "dur" and math.isfinite(number):
            found[name] = number
    return found


def _part(text: str) -> str:
    return quote(text, safe="")


def _stretched(timeout_secs: float | None) -> float:
    # What is not a number is for the daemon to refuse, by name.
    return timeout_secs + _MARGIN_SECS if isinstance(timeout_secs, int | float) else 0.0


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
