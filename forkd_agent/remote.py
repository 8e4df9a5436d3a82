"""What `fork_map` calls in each child: run a piece of source on one input, answer in JSON text.

Always answers; whatever the source raises is part of the answer.
"""

from __future__ import annotations

import ast
import json
import linecache
import traceback
from typing import Any

from forkd_agent.interpreter import RESULT_CHARS, import_numpy, one_line, shown

_FILE = "<fork_map>"


def run(source: str, name: str | None, input_json: str) -> str:
    """With a `name`, call that function of `source` on the input; without, `input` is bound and the value of
    the last expression is the result."""
    try:
        answer = _encode({"ok": _value(source, name, json.loads(input_json))})
        if shown(repr(answer))[1]:  # the cap of an eval's result would cut the JSON in two
            raise ValueError(
                f"the result is {len(answer)} characters of JSON, over the limit of about {RESULT_CHARS};"
                " write it to a file in the sandbox and read that instead"
            )
    except BaseException as e:
        trace = "".join(traceback.format_exception(type(e), e, e.__traceback__))
        return json.dumps({"error": one_line(e)[:4000], "traceback": trace[-16000:]})
    return answer


def _value(source: str, name: str | None, value: Any) -> Any:
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    space: dict[str, Any] = {"__name__": "__fork_map__"}
    if numpy := import_numpy():
        space["numpy"] = space["np"] = numpy
    if name is not None:
        exec(compile(source, _FILE, "exec"), space)
        return space[name](value)
    space["input"] = value
    tree = ast.parse(source, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _FILE, "exec"), space)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), _FILE, "eval"), space)


def _encode(answer: dict[str, Any]) -> str:
    try:
        return json.dumps(answer, default=_plain)
    except (TypeError, ValueError):  # keys that JSON has no form for, or a cycle
        return json.dumps({"ok": {"repr": repr(answer["ok"])}})


def _plain(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return {"repr": repr(value)}
