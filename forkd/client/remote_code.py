"""Turns code or a function, and an input, into the one expression a child evaluates; and its answer back.

Pure text in and out: knows nothing of sandboxes.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

# An agent's line is capped at 128 KiB; the rest of its frame needs some of that.
_EXPRESSION_BYTES = 120 * 1024
_PROVIDED = frozenset({"np", "numpy", *vars(builtins)})


@dataclass(frozen=True, slots=True)
class Program:
    """Source, and the function of it to call; without a name, `input` is bound and the last value counts."""

    source: str
    name: str | None

    def expression(self, index: int, value: Any) -> str:
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise ValueError(f"input {index} cannot be sent as JSON: {e}") from None
        args = f"{self.source!r}, {self.name!r}, {text!r}"
        code = f'__import__("forkd_agent.remote", fromlist=["run"]).run({args})'
        if len(json.dumps(code)) > _EXPRESSION_BYTES:
            raise ValueError(
                f"code and input {index} are over {_EXPRESSION_BYTES} bytes together;"
                " write large data into the snapshot's image or a file instead"
            )
        return code


def program(code_or_fn: str | Callable[[Any], Any]) -> Program:
    if isinstance(code_or_fn, str):
        try:
            ast.parse(code_or_fn)
        except (SyntaxError, ValueError) as e:
            raise ValueError(f"the code does not compile: {e}") from None
        return Program(code_or_fn, None)
    return _of_function(code_or_fn)


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any = None
    error: str | None = None
    traceback: str | None = None


def answer(reply: dict[str, Any]) -> Answer:
    """What an eval's reply says: the value, or what the child raised. Never raises."""
    if reply.get("error") is not None:
        return Answer(error=str(reply["error"]))
    try:
        said = json.loads(ast.literal_eval(reply["result"]))
        if "error" in said:
            return Answer(error=str(said["error"]), traceback=said.get("traceback"))
        return Answer(said["ok"])
    except (KeyError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Answer(error="the sandbox's answer cannot be read; its agent may be of another version")


def _of_function(fn: Callable[[Any], Any]) -> Program:
    def refuse(problem: str, remedy: str) -> ValueError:
        name = getattr(fn, "__qualname__", repr(fn))
        return ValueError(f"fork_map cannot send {name}: {problem}; {remedy}")

    code = "pass the code as a string, with the input under the name `input`"
    if not isinstance(fn, FunctionType):
        kind = "it is a bound method" if inspect.ismethod(fn) else "it is not a plain Python function"
        raise refuse(kind, f"write a `def` at the top level of a module, or {code}")
    if fn.__name__ == "<lambda>":
        raise refuse("it is a lambda", f"give it a name with `def`, or {code}")
    if fn.__closure__:
        captured = ", ".join(fn.__code__.co_freevars)
        raise refuse(f"it captures {captured} from around it", "pass those as part of the input")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise refuse("it is a coroutine or generator", "return a plain value")
    if outside := sorted(set(_globals(fn.__code__)) - _PROVIDED - {fn.__name__}):
        names = ", ".join(outside)
        raise refuse(f"it uses {names} from its module, which a child does not have", "import inside it")
    try:
        source = textwrap.dedent(inspect.getsource(fn))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        raise refuse("its source cannot be found", f"define it in a file, or {code}") from None
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise refuse("it is decorated", "send the function without its decorators")
    # Annotations may name types that only the caller has.
    return Program(f"from __future__ import annotations\n{source}", fn.__name__)


def _globals(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)
