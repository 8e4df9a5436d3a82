"""One daemon from start to exit: lock, sockets, recovery, signals, drain.

Nothing listens before the runtime has recovered. What is refused at start is a
ForkdError and has changed nothing; the caller turns it into exit code 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from forkd import __version__
from forkd.config import Config
from forkd.daemon.app import make_app
from forkd.daemon.audit import AuditLog
from forkd.daemon.auth import Tokens
from forkd.daemon.context import Context
from forkd.daemon.hosts import Bind, parse_bind
from forkd.daemon.http1 import hardened
from forkd.daemon.idempotency import Replays
from forkd.daemon.limits import Limits
from forkd.daemon.metrics import DEFAULT_BRANCH_CAP, Metrics
from forkd.daemon.ports import MakeRuntime, RuntimeApi
from forkd.daemon.sockets import bind_tcp, bind_unix, unlink_socket
from forkd.errors import BadField, ForkdError, InUse
from forkd.models import SandboxState

_IDLE_LOOK_SECS = 1.0


def serve(
    config: Config,
    make_runtime: MakeRuntime,
    *,
    limits: Limits | None = None,
    branch_cap: int = DEFAULT_BRANCH_CAP,
) -> int:
    """Run until a signal or the idle exit. The exit code; a refusal to start is raised."""
    limits = limits or Limits()
    tokens = Tokens(config.token_file)
    bind = parse_bind(config.bind) if config.bind else None
    if bind is not None and not bind.ip.is_loopback and not tokens.required:
        raise BadField(
            "bind", f"{config.bind} is open to other hosts and there is no token", hint="give a --token-file"
        )
    with ExitStack() as stack:
        stack.enter_context(_data_folder(config.data_dir))
        sockets = _bound(config, bind, stack)
        log = AuditLog(config.audit_path)
        stack.callback(log.close)
        _raise_file_limit()
        runtime = make_runtime(config)
        metrics = Metrics(runtime, __version__, branch_cap)
        context = Context(runtime, metrics, limits, Replays(limits.replays, limits.replay_secs))
        app = make_app(context, log, tokens, bind, config.allowed_hosts)
        daemon = Daemon(app, runtime, limits, sockets, lambda: _announce(sockets, config))
        return asyncio.run(_run(daemon, tokens, metrics, config.idle_exit_secs))


class Daemon(uvicorn.Server):
    """The app on its sockets, with the runtime's life wrapped around it."""

    def __init__(
        self,
        app: ASGIApp,
        runtime: RuntimeApi,
        limits: Limits,
        sockets: list[socket.socket],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=hardened(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_keep_alive=limits.idle_secs,
                timeout_graceful_shutdown=limits.drain_secs,
            )
        )
        self._runtime = runtime
        self._sockets = sockets
        self._on_ready = on_ready

    async def run_to_end(self) -> None:
        """Recover, serve until `should_exit`, finish what is under way, close the runtime."""
        try:
            await self._runtime.start()
            if not self.should_exit:
                await self.serve(self._sockets)
        finally:
            await self._runtime.close()

    def alive(self) -> bool:
        """Is there a sandbox that somebody may still want?"""
        return any(sandbox.state is not SandboxState.DEAD for sandbox in self._runtime.sandboxes())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are `_run`'s


async def _run(daemon: Daemon, tokens: Tokens, metrics: Metrics, idle_exit_secs: int) -> int:
    loop = asyncio.get_running_loop()
    work = loop.create_task(daemon.run_to_end())

    def stop() -> None:
        if daemon.should_exit:
            _say("stopped at once by a second signal; sandboxes are adopted at the next start")
            os._exit(1)
        daemon.should_exit = True
        if not daemon.started:
            work.cancel()  # recovery can take long, and can be done again

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, _reload, tokens)
    async with contextlib.AsyncExitStack() as stack:
        if idle_exit_secs:
            watch = loop.create_task(_leave_when_idle(daemon, metrics, idle_exit_secs))
            stack.callback(watch.cancel)
        try:
            await work
        except asyncio.CancelledError:
            if not daemon.should_exit:
                raise
    return 0


def _reload(tokens: Tokens) -> None:
    try:
        tokens.reload()
        _say("read the token file again" if tokens.required else "there is no token file to read again")
    except ForkdError as e:
        _say(f"the old token stays: {e}")


async def _leave_when_idle(daemon: Daemon, metrics: Metrics, secs: int) -> None:
    while True:
        await asyncio.sleep(min(_IDLE_LOOK_SECS, secs))
        quiet = not metrics.in_flight and time.monotonic() - metrics.last_request >= secs
        if daemon.started and quiet and not daemon.alive():
            daemon.should_exit = True
            return


@contextmanager
def _data_folder(path: Path) -> Iterator[None]:
    """Ours alone, until the process ends."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise BadField("data_dir", f"cannot use {path}: {e.strerror}") from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise InUse(
                f"{path} is in use by another forkd-controller (pid {owner})",
                hint="stop that one, or give another --data-dir",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _bound(config: Config, bind: Bind | None, stack: ExitStack) -> list[socket.socket]:
    sockets = [bind_unix(config.socket)]
    stack.callback(unlink_socket, config.socket)
    stack.callback(sockets[0].close)
    if bind is not None:
        sockets.append(bind_tcp(bind))
        stack.callback(sockets[1].close)
    return sockets


def _announce(sockets: list[socket.socket], config: Config) -> None:
    urls = []
    for sock in sockets[1:]:
        host, port = sock.getsockname()[:2]
        urls.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    _say(f"listening on {' and '.join([*urls, str(config.socket)])}")


def _raise_file_limit() -> None:
    # The usual soft limit is below our cap on connections.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(text: str) -> None:
    print(f"forkd-controller {text}", file=sys.stderr, flush=True)
