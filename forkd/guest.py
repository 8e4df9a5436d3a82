"""What the host asks of a guest, in the host's own types. The frames are `forkd_agent.protocol`'s."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from forkd.agent_link import AgentLink
from forkd.errors import AgentFailed, BadRequest, NoSpace
from forkd.models import EvalResult, ExecRequest, ExecResult
from forkd_agent.protocol import CHUNK_BYTES, Frame, ProtocolError, pack_bytes, unpack_bytes

CLOCK_TOLERANCE_MS = 500
OUTPUT_CAP_BYTES = 1 << 20  # per stream
_GRACE_SECS = 5  # on top of a guest-side timeout, for the reply to travel


async def wake(link: AgentLink, hostname: str, timeout: float) -> None:
    """Make the clone a machine of its own, or raise: an unconfirmed child is not handed out."""
    reply = await link.call(
        "wake",
        timeout=timeout,
        entropy=pack_bytes(os.urandom(64)),
        realtime_ns=time.time_ns(),
        hostname=hostname,
        machine_id=secrets.token_hex(16),
        boot_id=str(uuid.uuid4()),
    )
    if reply["ev"] == "error":
        raise AgentFailed("wake", str(reply.get("error")))
    clock = reply.get("clock_ns")
    if not isinstance(clock, int) or abs(clock - time.time_ns()) > CLOCK_TOLERANCE_MS * 1_000_000:
        raise AgentFailed("wake", f"its clock is more than {CLOCK_TOLERANCE_MS} ms off")


async def warm(link: AgentLink, script: str, env: dict[str, str], timeout: float) -> None:
    reply = await link.call("warm", timeout=timeout, script=script, env=env)
    if reply["ev"] == "error":
        raise AgentFailed("warm-up", str(reply.get("error")))


async def ping(link: AgentLink) -> dict[str, Any]:
    reply = await link.call("ping", timeout=5)
    return {k: v for k, v in reply.items() if k not in ("id", "ev")}


async def stats(link: AgentLink) -> dict[str, Any]:
    reply = await link.call("stats", timeout=10)
    if reply["ev"] == "error":
        raise AgentFailed("stats", str(reply.get("error")))
    return {k: v for k, v in reply.items() if k not in ("id", "ev")}


async def run(link: AgentLink, request: ExecRequest) -> ExecResult:
    output = {1: bytearray(), 2: bytearray()}
    over = False

    def collect(frame: Frame) -> None:
        nonlocal over
        if frame.get("ev") == "out" and frame.get("fd") in (1, 2):
            stream = output[frame["fd"]]
            stream += unpack_bytes(frame.get("b"))
            over = over or len(stream) > OUTPUT_CAP_BYTES
            del stream[OUTPUT_CAP_BYTES:]  # the guest caps too, but it is the guest

    try:
        end = await link.call(
            "exec",
            timeout=request.timeout_secs + _GRACE_SECS,
            on=collect,
            args=request.args,
            env=request.env,
            cwd=request.cwd,
            timeout_=request.timeout_secs,
            cap=OUTPUT_CAP_BYTES,
        )
    except ProtocolError as e:
        raise AgentFailed("exec", str(e)) from e
    out, err = (bytes(output[fd]).decode(errors="replace") for fd in (1, 2))
    if end["ev"] == "error":
        return ExecResult(
            out, err + str(end.get("error")), 127 if end.get("type") == "FileNotFoundError" else 126
        )
    cut = end.get("truncated")
    truncated = over or (isinstance(cut, dict) and any(cut.values()))
    timed_out = end.get("timed_out") is True
    if timed_out:
        err += f"\ntimed out after {request.timeout_secs:g} s; everything it had started was killed\n"
    return ExecResult(out, err, _integer(end.get("exit_code")), truncated, timed_out)


async def evaluate(link: AgentLink, code: str, timeout_secs: float) -> EvalResult:
    end = await link.call("eval", timeout=timeout_secs + _GRACE_SECS, code=code, timeout_=timeout_secs)
    if end["ev"] == "error" or end.get("error") is not None:
        return EvalResult(None, str(end.get("error")), 1, str(end.get("traceback") or ""))
    return EvalResult(str(end.get("result")), None, _integer(end.get("exit_code")))


async def read_file(link: AgentLink, path: str) -> AsyncIterator[bytes]:
    async with link.request("read", path=path) as events:
        async for event in events:
            if event.get("ev") == "chunk":
                yield unpack_bytes(event.get("b"))
            elif event.get("ev") == "error":
                raise _file_error(path, event)


async def write_file(link: AgentLink, path: str, chunks: AsyncIterator[bytes], mode: int | None) -> int:
    async with link.request("write", path=path, mode=mode, mkdirs=True) as events:
        number = link.last_id
        async for chunk in chunks:
            for at in range(0, len(chunk), CHUNK_BYTES):
                await link.send(number, "data", b=pack_bytes(chunk[at : at + CHUNK_BYTES]))
        await link.send(number, "eof")
        async for event in events:
            if event.get("ev") == "error":
                raise _file_error(path, event)
            if event.get("ev") == "end":
                return _integer(event.get("size"))
    raise AgentFailed("write", "the channel closed")


def _file_error(path: str, event: Frame) -> Exception:
    text = str(event.get("error"))
    if "No space left" in text:
        return NoSpace(f"{path}: {text}")
    return BadRequest(f"{path}: {text}")


def _integer(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
