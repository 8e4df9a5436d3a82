"""The warmed Python process: runs the warm-up, evaluates expressions beside it, renews itself on waking.

A child of the agent, which it talks to over two pipes in the agent's own frames.
Time limits are the agent's business; so is starting another one when this one dies.
"""

from __future__ import annotations

import _thread
import gc
import json
import linecache
import os
import signal
import sys
import threading  # noqa: F401 - must be loaded in the main thread, or the first eval's would pass for it
import time
import traceback
from typing import Any

from forkd_agent import hooks
from forkd_agent.protocol import Frame, LineBuffer, ProtocolError, decode, encode

RESULT_CHARS = 64 * 1024
_RESULT_JSON_BYTES = 96 * 1024  # as much again in escapes would not fit a frame
_ERROR_JSON_BYTES = 8 * 1024
_TRACE_JSON_BYTES = 64 * 1024
_JSON_BYTES_PER_CHAR = 12  # at worst: two escaped surrogates
_WARMUP_FILE = "<warm-up>"


class Interpreter:
    def __init__(self, rfd: int, wfd: int) -> None:
        self._rfd, self._wfd = rfd, wfd
        self._pid = os.getpid()
        self._write_lock = _thread.allocate_lock()  # guards the outgoing pipe: one frame at a time
        self._lines = LineBuffer()

    def serve(self) -> None:
        """Until the agent is gone."""
        while True:
            data = os.read(self._rfd, 65536)
            if not data:
                return
            for line in self._lines.feed(data):
                self._handle(decode(line))

    def _handle(self, frame: Frame) -> None:
        op = frame["op"]
        if op == "eval":
            # A thread each, so that one that never ends holds up no other. It cannot be ended from outside:
            # after its time limit it lingers until its code returns.
            try:
                _thread.start_new_thread(self._answer, (frame, evaluate))
            except RuntimeError as e:
                self._send({"id": frame["id"], "ev": "error", "type": "RuntimeError", "error": str(e)})
        else:
            self._answer(frame, warm_up if op == "warm" else wake)

    def _answer(self, frame: Frame, work: Any) -> None:
        try:
            reply = {"ev": "end", **work(frame)}
        except BaseException as e:
            error, trace = describe(e)
            reply = {"ev": "error", "type": type(e).__name__, "error": error, "traceback": trace}
        if os.getpid() != self._pid:
            os._exit(0)  # a fork made by the code itself; the answer is the original's to give
        self._send({"id": frame["id"], **reply})

    def _send(self, frame: Frame) -> None:
        try:
            rest = memoryview(encode(frame))
        except ProtocolError as e:
            rest = memoryview(encode({"id": frame["id"], "ev": "error", "type": "TooLarge", "error": str(e)}))
        with self._write_lock:
            while rest:
                rest = rest[os.write(self._wfd, rest) :]


def evaluate(frame: Frame) -> Frame:
    """One expression, in globals of its own: nothing it binds is seen by the next."""
    try:
        text = repr(_eval(frame["code"]))
    except BaseException as e:  # SystemExit and KeyboardInterrupt come from the code, and are its failure
        error, trace = describe(e)
        return {"error": error, "traceback": trace, "exit_code": 1}
    result, cut = shown(text)
    reply: Frame = {"result": result, "exit_code": 0}
    if cut:
        reply["truncated"] = True
    return reply


def shown(text: str) -> tuple[str, bool]:
    """A result as it is sent, and whether something was cut off."""
    result, cut = clip(text[:RESULT_CHARS], _RESULT_JSON_BYTES)
    return result[:RESULT_CHARS], cut or max(len(text), len(result)) > RESULT_CHARS


def _eval(source: str) -> Any:
    code = compile(source.lstrip(" \t"), "<eval>", "eval")
    space: dict[str, Any] = {"__name__": "__eval__"}  # without it a class made here has no __module__
    numpy = sys.modules.get("numpy")
    if numpy is None and ("np" in source or "numpy" in source):
        numpy = import_numpy()
    if numpy is not None:
        space["numpy"] = space["np"] = numpy
    return eval(code, space)


def import_numpy() -> Any:
    try:
        return __import__("numpy")
    except ImportError:
        return None


def warm_up(frame: Frame) -> Frame:
    """Run the recipe's source as the main module, then set what it made apart from the garbage collector,
    whose marks would otherwise dirty those pages in every child."""
    started = time.monotonic()
    os.environ.update(frame["env"])
    script = frame["script"]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    linecache.cache[_WARMUP_FILE] = (len(script), None, script.splitlines(keepends=True), _WARMUP_FILE)
    exec(compile(script, _WARMUP_FILE, "exec"), module.__dict__)
    gc.collect()
    gc.freeze()
    numpy = sys.modules.get("numpy")
    return {
        "ok": True,
        "seconds": round(time.monotonic() - started, 6),
        "numpy_version": getattr(numpy, "__version__", None),
    }


def wake(_frame: Frame) -> Frame:
    """Renew what every child would share. The kernel's own generator has been reseeded before."""
    loaded = sys.modules.get
    if random := loaded("random"):
        random.seed(int.from_bytes(os.urandom(32), "little"))
    if loaded("numpy.random"):
        numpy = sys.modules["numpy"]
        numpy.random.seed(numpy.frombuffer(os.urandom(64), dtype=numpy.uint32))
    if ssl := loaded("_ssl"):
        ssl.RAND_add(os.urandom(64), 64.0)  # OpenSSL keeps a generator of its own and notices only forks
    if uuid := loaded("uuid"):
        _renew_uuid(uuid)
    if tempfile := loaded("tempfile"):
        setattr(tempfile, "_name_sequence", None)  # noqa: B010 - a private name, unknown to type stubs
    hooks.run_all()
    return {"ok": True}


def _renew_uuid(uuid: Any) -> None:
    # A node of our own with the multicast bit, which no network card has. The C helper is set aside: it keeps
    # a node and a sequence that cannot be reached from here.
    uuid._node = int.from_bytes(os.urandom(6), "big") | (1 << 40)
    uuid._generate_time_safe = None
    for name in ("_last_timestamp", "_last_timestamp_v6", "_last_timestamp_v7"):
        if hasattr(uuid, name):
            setattr(uuid, name, None)


def describe(error: BaseException) -> tuple[str, str]:
    """The error in one line, and its traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except (
        BaseException
    ):  # an exception can be made so that it cannot be shown; an answer is owed all the same
        text = one_line(error)
    return clip(one_line(error), _ERROR_JSON_BYTES)[0], clip(text[-_TRACE_JSON_BYTES:], _TRACE_JSON_BYTES)[0]


def one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = "its message could not be made"
    return f"{type(error).__name__}: {text}"


def clip(text: str, limit_bytes: int) -> tuple[str, bool]:
    """Text that takes at most so many bytes as JSON, and whether something was cut off."""
    if len(text) * _JSON_BYTES_PER_CHAR <= limit_bytes and text.isascii():
        return text, False  # nearly always, and the checks below cost more than most evals
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    cut = False
    while (size := len(json.dumps(text))) > limit_bytes:
        text = text[: max(0, min(len(text) - 1, len(text) * limit_bytes // size))]
        cut = True
    return text, cut


def run(rfd: int, wfd: int) -> None:
    """Never returns: a forked copy of the agent must not get back into the agent's code."""
    try:
        os.setsid()  # so that `kill 0` in user code stays here
        # A handler rather than SIG_IGN, which commands started from here would inherit.
        signal.signal(signal.SIGINT, lambda *_: None)
        _use_null_stdin()
        Interpreter(rfd, wfd).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _use_null_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
