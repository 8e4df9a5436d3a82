"""`Controller`: the daemon's REST surface as blocking calls.

Each method is one request; what a request looks like is in `calls`, how it travels in `http`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forkd.client import calls
from forkd.client.calls import BranchMode, Call
from forkd.client.failures import BadReply
from forkd.client.http import Reply, Transport

if TYPE_CHECKING:
    from forkd.client.fork_map import ForkResult

__all__ = ["API", "DEFAULT_URL", "BranchMode", "Controller"]

API = "v1"
DEFAULT_URL = "http://127.0.0.1:8889"

Json = dict[str, Any]


class Controller:
    """A client of one daemon; safe to share between threads.

    >>> c = Controller()                       # $FORKD_URL, else http://127.0.0.1:8889
    >>> child = c.spawn_sandboxes("numpy")[0]
    >>> c.eval_code(child["id"], "numpy.arange(3).sum()")["result"]
    '3'
    >>> c.kill_sandbox(child["id"])

    `base_url` may also be `unix:///path/forkd.sock`; `Controller.local()` finds or starts a private daemon.
    Raises `ControllerError` when the daemon says no, and `ConnectionFailed` (an `OSError` and a `URLError`)
    when it does not answer.
    """

    def __init__(self, base_url: str | None = None, token: str | None = None, timeout: float = 60.0) -> None:
        self.base_url = (base_url or os.environ.get("FORKD_URL") or DEFAULT_URL).rstrip("/")
        self.token = token if token is not None else os.environ.get("FORKD_TOKEN")
        self.timeout = timeout
        calls.checked_token(self.token)
        self._transport = Transport(self.base_url)

    @classmethod
    def local(cls, data_dir: Path | None = None, *, timeout: float = 60.0) -> Self:
        """A client of the daemon at $FORKD_URL, or of this user's private one, started if need be."""
        from forkd.client.private_daemon import ensure_daemon

        return cls(ensure_daemon(data_dir), timeout=timeout)

    def close(self) -> None:
        """Close idle connections. The controller stays usable."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the daemon ------------------------------------------------

    def healthz(self) -> Json:
        return self._json(calls.healthz())

    def version(self) -> Json:
        """The daemon's version. Raises `BadReply` when it serves another API than this client speaks."""
        reply = self._json(calls.version())
        if reply.get("api") != API:
            raise BadReply(200, reply, f"{self.base_url}/version")
        return reply

    def host_report(self) -> Json:
        """What this host can run, as checks with a level, a detail and a hint, and a verdict."""
        return self._json(calls.host())

    # --- images and snapshots --------------------------------------

    def list_images(self) -> list[Json]:
        return self._list(calls.images())

    def list_snapshots(self) -> list[Json]:
        return self._list(calls.snapshots())

    def create_snapshot(
        self,
        tag: str,
        *,
        image: str | None = None,
        kernel: str | os.PathLike[str] | None = None,
        rootfs: str | os.PathLike[str] | None = None,
        accel: str | None = None,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        boot_wait_secs: int | None = None,
    ) -> Json:
        """Boot, warm and capture a parent: from an image, or a kernel and a rootfs on the daemon's host.

        >>> c.create_snapshot("numpy", image="python-numpy", accel="tcg")["status"]
        'ready'
        """
        call = calls.create_snapshot(
            tag,
            image=image,
            kernel=None if kernel is None else os.fspath(kernel),
            rootfs=None if rootfs is None else os.fspath(rootfs),
            accel=accel,
            vcpus=vcpus,
            memory_mib=memory_mib,
            boot_wait_secs=boot_wait_secs,
        )
        return self._json(call)

    def snapshot_info(self, tag: str) -> Json:
        """Sizes, ancestors and dependents of one snapshot."""
        return self._json(calls.snapshot_info(tag))

    def delete_snapshot(self, tag: str, cascade: bool = False, force: bool = False) -> None:
        """Remove a snapshot; `cascade` takes its descendants too, `force` leaves them behind unusable."""
        self._send(calls.delete_snapshot(tag, cascade=cascade, force=force))

    def set_standby(self, tag: str, size: int) -> None:
        """Keep this many machines of a snapshot loaded, so that the next spawns are shorter."""
        self._send(calls.set_standby(tag, size))

    # --- sandboxes -------------------------------------------------

    def spawn_sandboxes(
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        prewarm: bool = False,
        live_fork: bool = False,
        hugepages: bool = False,
        *,
        ttl_secs: int | None = None,
        isolation: str | None = None,
        idempotency_key: str | None = None,
    ) -> list[Json]:
        """Fork n children of a snapshot: all of them, awake, or none.

        `ttl_secs`: each is killed that long after its last `touch`. `isolation="vm"` refuses anything less.
        With an `idempotency_key` the same request sent again answers with the same children.
        """
        call = calls.spawn(
            snapshot_tag,
            n,
            per_child_netns=per_child_netns,
            memory_limit_mib=memory_limit_mib,
            prewarm=prewarm,
            live_fork=live_fork,
            hugepages=hugepages,
            ttl_secs=ttl_secs,
            isolation=isolation,
            idempotency_key=idempotency_key,
        )
        return self._list(call)

    def spawn_with_timing(
        self, snapshot_tag: str, n: int = 1, **options: Any
    ) -> tuple[list[Json], dict[str, float]]:
        """`spawn_sandboxes`, and its cost inside the daemon: milliseconds to `running` and to `ready`."""
        call = calls.spawn(snapshot_tag, n, **options)
        reply = self._exchange(call)
        headers = {name.lower(): value for name, value in reply.headers.items()}
        rows: list[Json] = call.result(reply.status, reply.body, self.base_url + call.path)
        return rows, calls.server_timing(headers.get("server-timing"))

    def list_sandboxes(self) -> list[Json]:
        return self._list(calls.sandboxes())

    def get_sandbox(self, sandbox_id: str) -> Json:
        return self._json(calls.sandbox(sandbox_id))

    def kill_sandbox(self, sandbox_id: str) -> None:
        self._send(calls.kill(sandbox_id))

    def touch(self, sandbox_id: str) -> Json:
        """Restart the sandbox's time to live."""
        return self._json(calls.touch(sandbox_id))

    def stats(self, sandbox_id: str) -> Json:
        """Load, memory and disk as the guest sees them."""
        return self._json(calls.stats(sandbox_id))

    def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: BranchMode | None = None,
        wait: bool = True,
    ) -> Json:
        """Capture a running sandbox as a new snapshot. `mode` wins over the older `diff`."""
        return self._json(
            calls.branch(sandbox_id, tag, diff=diff, measure_diff=measure_diff, mode=mode, wait=wait)
        )

    # --- inside a sandbox ------------------------------------------

    def exec_command(
        self,
        sandbox_id: str,
        args: Sequence[str],
        timeout_secs: float = 30,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Json:
        """Run a program; a non-zero `exit_code` is an answer, not an error."""
        return self._json(calls.execute(sandbox_id, args, timeout_secs, env=env, cwd=cwd))

    def eval_code(self, sandbox_id: str, code: str, *, timeout_secs: float | None = None) -> Json:
        """Evaluate one expression in the warmed interpreter: `{result, error, exit_code}`."""
        return self._json(calls.evaluate(sandbox_id, code, timeout_secs))

    def ping_sandbox(self, sandbox_id: str) -> Json:
        return self._json(calls.ping(sandbox_id))

    def read_file(self, sandbox_id: str, path: str) -> bytes:
        data: bytes = self._send(calls.read_file(sandbox_id, path))
        return data

    def write_file(self, sandbox_id: str, path: str, data: bytes | str, mode: int | None = None) -> int:
        """Write a whole file, atomically; returns the number of bytes."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        self._send(calls.write_file(sandbox_id, path, raw, mode))
        return len(raw)

    def fork_map(
        self,
        code_or_fn: str | Callable[[Any], Any],
        inputs: Iterable[Any],
        *,
        tag: str,
        max_parallel: int | None = None,
        timeout: float = 30,
    ) -> list[ForkResult]:
        """`forkd.fork_map` on this daemon."""
        from forkd.client.fork_map import fork_map

        return fork_map(
            code_or_fn, inputs, tag=tag, controller=self, max_parallel=max_parallel, timeout=timeout
        )

    # --- internals -------------------------------------------------

    def _json(self, call: Call) -> Json:
        reply: Json = self._send(call)
        return reply

    def _list(self, call: Call) -> list[Json]:
        reply: list[Json] = self._send(call)
        return reply

    def _send(self, call: Call) -> Any:
        reply = self._exchange(call)
        return call.result(reply.status, reply.body, self.base_url + call.path)

    def _exchange(self, call: Call) -> Reply:
        headers, body = call.encoded(calls.checked_token(self.token))
        timeout = max(self.timeout, call.at_least_secs)
        return self._transport.request(
            call.method, call.path, headers=headers, body=body, timeout=timeout, retry=call.retry
        )
