"""`Sandbox`: one child, forked for the length of a `with` block.

Owns that child: it is killed when the block, the object or the process ends. What runs in it goes through the
daemon, or with `spawn=False` straight to an agent at `target` (see `direct`).
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, overload

from forkd.client.controller import Controller
from forkd.client.direct import Agent
from forkd.client.failures import ConnectionFailed, ControllerError
from forkd.client.keepalive import TTL_SECS, KeepAlive

Json = dict[str, Any]
_LAST_KILL_SECS = 5.0


@dataclass
class CommandResult:
    """What a command left behind."""

    stdout: str
    stderr: str
    exit_code: int
    truncated: bool = False
    timed_out: bool = False


class _Backend(Protocol):
    """Requests in the agent's own words, whichever way they travel."""

    def exec(
        self, args: list[str], timeout: float, env: Mapping[str, str] | None, cwd: str | None
    ) -> Json: ...
    def eval(self, code: str) -> Json: ...
    def ping(self) -> Json: ...


class Commands:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(
        self,
        cmd: str | Sequence[str],
        timeout: float = 30,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> CommandResult:
        """Run a command: text goes through `/bin/sh -c`, a sequence is the argument vector itself."""
        args = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        reply = self._sandbox._backend.exec(args, timeout, env, cwd)
        if "error" in reply and "stdout" not in reply:
            return CommandResult(stdout="", stderr=str(reply["error"]), exit_code=1)
        return CommandResult(
            stdout=reply.get("stdout", ""),
            stderr=reply.get("stderr", ""),
            exit_code=int(reply.get("exit_code", -1)),
            truncated=bool(reply.get("truncated", False)),
            timed_out=bool(reply.get("timed_out", False)),
        )


class Files:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @overload
    def read(self, path: str, format: Literal["text"] = "text") -> str: ...
    @overload
    def read(self, path: str, format: Literal["bytes"]) -> bytes: ...
    def read(self, path: str, format: Literal["text", "bytes"] = "text") -> str | bytes:
        """The whole file, as UTF-8 text or as bytes."""
        if format not in ("text", "bytes"):
            raise ValueError(f"format is {format!r}; use 'text' or 'bytes'")
        controller, sandbox_id = self._sandbox._remote()
        data = controller.read_file(sandbox_id, path)
        return data.decode() if format == "text" else data

    def write(self, path: str, data: str | bytes, mode: int | None = None) -> int:
        """Write the whole file, atomically; returns the number of bytes."""
        controller, sandbox_id = self._sandbox._remote()
        return controller.write_file(sandbox_id, path, data, mode)


class Sandbox:
    """One forked sandbox.

    >>> with Sandbox("numpy") as sb:
    ...     print(sb.commands.run("echo hi").stdout, end="")
    ...     sb.files.write("/tmp/x", "42")
    ...     sb.eval("int(open('/tmp/x').read()) + 1")
    hi
    2
    '43'

    Without a `controller`, the daemon is the one at $FORKD_URL or a private one. `spawn=False` forks nothing
    and talks to the agent that listens at `target`. Leaving the block kills the sandbox, whatever happened in
    it; a process that dies without that leaves it for the daemon to remove within `ttl_secs`.
    """

    DEFAULT_TAG: ClassVar[str] = os.environ.get("FORKD_TAG", "pyagent")
    DEFAULT_TARGET: ClassVar[str] = os.environ.get("FORKD_TARGET", "10.42.0.2:8888")

    def __init__(
        self,
        tag: str | None = None,
        target: str | None = None,
        timeout: float = 30,
        *,
        spawn: bool = True,
        controller: Controller | None = None,
        memory_limit_mib: int | None = None,
        isolation: str | None = None,
        ttl_secs: int = TTL_SECS,
    ) -> None:
        self.tag = tag or self.DEFAULT_TAG
        self.target = target or self.DEFAULT_TARGET
        self.timeout = timeout
        self.id: str | None = None
        self.info: Json | None = None
        self.guest_addr: str = self.target
        self._child: _Child | None = None
        self._backend: _Backend = Agent(self.target, timeout)
        if spawn:
            self._spawn(controller or Controller.local(), target, memory_limit_mib, isolation, ttl_secs)

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        """The same as calling the class."""
        return cls(*args, **kwargs)

    # Made on each access: kept, they would form a cycle, and a dropped sandbox would not end at once.
    @property
    def commands(self) -> Commands:
        return Commands(self)

    @property
    def files(self) -> Files:
        return Files(self)

    def eval(self, code: str) -> object:
        """Evaluate one expression in the warmed interpreter; returns its `repr`.

        >>> sb.eval("numpy.zeros(2).tolist()")
        '[0.0, 0.0]'

        Raises RuntimeError with what the expression raised.
        """
        reply = self._backend.eval(code)
        if reply.get("error") is not None:
            raise RuntimeError(f"forkd eval: {reply['error']}")
        if "result_json" in reply:
            return json.loads(reply["result_json"])
        return reply.get("result")

    def ping(self) -> Json:
        """A round trip to the agent: `pong`, `numpy_version`, and more."""
        return self._backend.ping()

    def kill(self) -> None:
        """Kill the sandbox. Once it is gone, killing it again does nothing."""
        if self._child is None:
            return
        self._child.kill()
        self._child = None
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.kill()
        except BaseException as e:
            print(
                f"forkd: could not kill sandbox {self.id}: {e}; remove it with: forkd kill {self.id}",
                file=sys.stderr,
            )
            # What went wrong inside the block matters more than this, unless this is the user's Ctrl-C.
            if not isinstance(e, ControllerError | ConnectionFailed):
                raise

    def _spawn(
        self,
        controller: Controller,
        target: str | None,
        memory_limit_mib: int | None,
        isolation: str | None,
        ttl_secs: int,
    ) -> None:
        rows = controller.spawn_sandboxes(
            self.tag, memory_limit_mib=memory_limit_mib, ttl_secs=ttl_secs, isolation=isolation
        )
        self.info = rows[0]
        self.id = str(self.info["id"])
        self.guest_addr = str(self.info["guest_addr"])
        self.target = target or self.guest_addr
        self._child = _Child(controller, self.id, ttl_secs)
        self._backend = _Remote(controller, self.id)
        self._finalizer = weakref.finalize(self, self._child.abandon)

    def _remote(self) -> tuple[Controller, str]:
        if self.id is None or not isinstance(self._backend, _Remote):
            raise RuntimeError("files go through the daemon: make the Sandbox with spawn=True")
        return self._backend.controller, self.id


class _Child:
    """The claim on a spawned sandbox; it holds no reference to the `Sandbox`, so that can be collected."""

    def __init__(self, controller: Controller, sandbox_id: str, ttl_secs: int) -> None:
        self._controller = controller
        self._id = sandbox_id
        self._pid = os.getpid()
        self._keepalive = KeepAlive(controller, [sandbox_id], ttl_secs)

    def kill(self) -> None:
        self._keepalive.stop()
        kill_if_there(self._controller, self._id)

    def abandon(self) -> None:
        """The last chance: the object was dropped, or the interpreter is leaving. Else the TTL does it."""
        self._keepalive.stop()
        if os.getpid() != self._pid:  # a forked copy of this process owns nothing
            return
        brief = Controller(self._controller.base_url, self._controller.token, _LAST_KILL_SECS)
        try:
            with brief:
                kill_if_there(brief, self._id)
        except (ControllerError, ConnectionFailed):
            pass


class _Remote:
    def __init__(self, controller: Controller, sandbox_id: str) -> None:
        self.controller = controller
        self._id = sandbox_id

    def exec(self, args: list[str], timeout: float, env: Mapping[str, str] | None, cwd: str | None) -> Json:
        return self.controller.exec_command(self._id, args, timeout, env=env, cwd=cwd)

    def eval(self, code: str) -> Json:
        return self.controller.eval_code(self._id, code)

    def ping(self) -> Json:
        return self.controller.ping_sandbox(self._id)


def kill_if_there(controller: Controller, sandbox_id: str) -> None:
    try:
        controller.kill_sandbox(sandbox_id)
    except ControllerError as e:
        if e.status != 404:
            raise
