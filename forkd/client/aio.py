"""`AsyncController`: the calls of `Controller` as coroutines, over httpx.

Requests and replies are those of `calls`; only the way they travel is different.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from forkd.client import calls
from forkd.client.calls import BranchMode, Call
from forkd.client.controller import API, DEFAULT_URL
from forkd.client.failures import BadReply, ConnectionFailed, ControllerError, TimedOut
from forkd.client.fork_map import ForkResult, Job, checked_parallel, could_not_kill, ttl_secs
from forkd.client.http import Endpoint, short_path
from forkd.client.remote_code import Answer, answer, program

try:
    import httpx
except ImportError as e:
    raise ImportError("AsyncController needs httpx: pip install 'forkd[async]'") from e

Json = dict[str, Any]
_IDLE_SECS = 2.0  # shorter than a server keeps a connection


class AsyncController:
    """An asynchronous client of one daemon.

    >>> async with AsyncController() as c:
    ...     [child] = await c.spawn_sandboxes("numpy")
    ...     await c.eval_code(child["id"], "1 + 1")

    Arguments, addresses, results and errors are those of `Controller`.
    """

    def __init__(self, base_url: str | None = None, token: str | None = None, timeout: float = 60.0) -> None:
        self.base_url = (base_url or os.environ.get("FORKD_URL") or DEFAULT_URL).rstrip("/")
        self.token = token if token is not None else os.environ.get("FORKD_TOKEN")
        self.timeout = timeout
        calls.checked_token(self.token)
        self._stack = ExitStack()
        self._root, self._client = self._open(Endpoint.parse(self.base_url))

    @classmethod
    async def local(cls, data_dir: Path | None = None, *, timeout: float = 60.0) -> Self:
        """A client of the daemon at $FORKD_URL, or of this user's private one, started if need be."""
        from forkd.client.private_daemon import ensure_daemon

        return cls(await asyncio.to_thread(ensure_daemon, data_dir), timeout=timeout)

    async def aclose(self) -> None:
        try:
            await self._client.aclose()
        finally:
            self._stack.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- the daemon ------------------------------------------------

    async def healthz(self) -> Json:
        return await self._json(calls.healthz())

    async def version(self) -> Json:
        reply = await self._json(calls.version())
        if reply.get("api") != API:
            raise BadReply(200, reply, f"{self.base_url}/version")
        return reply

    async def host_report(self) -> Json:
        return await self._json(calls.host())

    # --- images and snapshots --------------------------------------

    async def list_images(self) -> list[Json]:
        return await self._list(calls.images())

    async def list_snapshots(self) -> list[Json]:
        return await self._list(calls.snapshots())

    async def create_snapshot(
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
        return await self._json(call)

    async def snapshot_info(self, tag: str) -> Json:
        return await self._json(calls.snapshot_info(tag))

    async def delete_snapshot(self, tag: str, cascade: bool = False, force: bool = False) -> None:
        await self._send(calls.delete_snapshot(tag, cascade=cascade, force=force))

    async def set_standby(self, tag: str, size: int) -> None:
        await self._send(calls.set_standby(tag, size))

    # --- sandboxes -------------------------------------------------

    async def spawn_sandboxes(
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
        return await self._list(call)

    async def spawn_with_timing(
        self, snapshot_tag: str, n: int = 1, **options: Any
    ) -> tuple[list[Json], dict[str, float]]:
        call = calls.spawn(snapshot_tag, n, **options)
        reply = await self._exchange(call)
        rows: list[Json] = call.result(reply.status_code, reply.content, self.base_url + call.path)
        return rows, calls.server_timing(reply.headers.get("server-timing"))

    async def list_sandboxes(self) -> list[Json]:
        return await self._list(calls.sandboxes())

    async def get_sandbox(self, sandbox_id: str) -> Json:
        return await self._json(calls.sandbox(sandbox_id))

    async def kill_sandbox(self, sandbox_id: str) -> None:
        await self._send(calls.kill(sandbox_id))

    async def touch(self, sandbox_id: str) -> Json:
        return await self._json(calls.touch(sandbox_id))

    async def stats(self, sandbox_id: str) -> Json:
        return await self._json(calls.stats(sandbox_id))

    async def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: BranchMode | None = None,
        wait: bool = True,
    ) -> Json:
        return await self._json(
            calls.branch(sandbox_id, tag, diff=diff, measure_diff=measure_diff, mode=mode, wait=wait)
        )

    # --- inside a sandbox ------------------------------------------

    async def exec_command(
        self,
        sandbox_id: str,
        args: Sequence[str],
        timeout_secs: float = 30,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Json:
        return await self._json(calls.execute(sandbox_id, args, timeout_secs, env=env, cwd=cwd))

    async def eval_code(self, sandbox_id: str, code: str, *, timeout_secs: float | None = None) -> Json:
        return await self._json(calls.evaluate(sandbox_id, code, timeout_secs))

    async def ping_sandbox(self, sandbox_id: str) -> Json:
        return await self._json(calls.ping(sandbox_id))

    async def read_file(self, sandbox_id: str, path: str) -> bytes:
        data: bytes = await self._send(calls.read_file(sandbox_id, path))
        return data

    async def write_file(self, sandbox_id: str, path: str, data: bytes | str, mode: int | None = None) -> int:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        await self._send(calls.write_file(sandbox_id, path, raw, mode))
        return len(raw)

    async def fork_map(
        self,
        code_or_fn: str | Callable[[Any], Any],
        inputs: Iterable[Any],
        *,
        tag: str,
        max_parallel: int | None = None,
        timeout: float = 30,
    ) -> list[ForkResult]:
        """`forkd.fork_map`; cancelling it kills the children too."""
        made = program(code_or_fn)
        jobs = [Job(value, made.expression(i, value)) for i, value in enumerate(list(inputs))]
        size = checked_parallel(max_parallel)
        results: list[ForkResult] = []
        for start in range(0, len(jobs), size):
            wave = jobs[start : start + size]
            try:
                results += await self._map_wave(wave, tag, timeout)
            except (ControllerError, ConnectionFailed) as e:
                if not results:
                    raise
                results += [ForkResult(job.input, error=f"not forked: {e}") for job in wave]
        return results

    async def _map_wave(self, wave: list[Job], tag: str, timeout: float) -> list[ForkResult]:
        rows = await self.spawn_sandboxes(tag, n=len(wave), ttl_secs=ttl_secs(timeout))
        ids = [str(row["id"]) for row in rows]
        try:
            return await asyncio.gather(*map(self._map_one, wave, ids, [timeout] * len(ids)))
        finally:
            # Shielded: a caller that is cancelled once more must not leave children behind.
            await asyncio.shield(asyncio.gather(*map(self._release, ids)))

    async def _map_one(self, job: Job, sandbox_id: str, timeout: float) -> ForkResult:
        started = time.perf_counter()
        try:
            reply = await self.eval_code(sandbox_id, job.expression, timeout_secs=timeout)
            return job.result(answer(reply), sandbox_id, started)
        except (ControllerError, ConnectionFailed) as e:
            return job.result(Answer(error=str(e)), sandbox_id, started)

    async def _release(self, sandbox_id: str) -> None:
        try:
            await self.kill_sandbox(sandbox_id)
        except (ControllerError, ConnectionFailed) as e:
            if not (isinstance(e, ControllerError) and e.status == 404):
                could_not_kill(sandbox_id, e)

    # --- internals -------------------------------------------------

    def _open(self, at: Endpoint) -> tuple[str, httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECS)
        if at.socket_path is None:
            return self.base_url, httpx.AsyncClient(limits=limits, trust_env=False)
        path = self._stack.enter_context(short_path(at.socket_path))
        transport = httpx.AsyncHTTPTransport(uds=path, limits=limits, trust_env=False)
        return "http://localhost", httpx.AsyncClient(transport=transport, trust_env=False)

    async def _json(self, call: Call) -> Json:
        reply: Json = await self._send(call)
        return reply

    async def _list(self, call: Call) -> list[Json]:
        reply: list[Json] = await self._send(call)
        return reply

    async def _send(self, call: Call) -> Any:
        reply = await self._exchange(call)
        return call.result(reply.status_code, reply.content, self.base_url + call.path)

    async def _exchange(self, call: Call) -> httpx.Response:
        headers, body = call.encoded(calls.checked_token(self.token))
        timeout = max(self.timeout, call.at_least_secs)
        url = self.base_url + call.path
        try:
            return await self._client.request(
                call.method, self._root + call.path, headers=headers, content=body, timeout=timeout
            )
        except httpx.TimeoutException as e:
            raise TimedOut(url, "the daemon did not answer in time") from e
        except httpx.HTTPError as e:
            problem = str(e) or type(e).__name__
            raise ConnectionFailed(url, f"cannot talk to the daemon: {problem}") from e
