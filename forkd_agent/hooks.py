"""What user code asks to have run in every fresh child, before the child is handed out.

Owns the list only; the interpreter's wake step decides when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Hook = Callable[[], Any]
_H = TypeVar("_H", bound=Hook)

_hooks: list[Hook] = []


class HookFailed(Exception):
    """A hook raised, so the child must not be used: it may still share what the hook was to renew."""


def after_fork(fn: _H) -> _H:
    """Run `fn()` in each child when it wakes, in the order of registration. Usable as a decorator.

    Example, for state that forkd cannot know about::

        rng = numpy.random.default_rng()

        @forkd_agent.after_fork
        def fresh_rng() -> None:
            global rng
            rng = numpy.random.default_rng()
    """
    if not callable(fn):
        raise TypeError(f"after_fork takes a function without arguments, not {type(fn).__name__}")
    _hooks.append(fn)
    return fn


def run_all() -> None:
    # A copy: a hook that registers another one speaks of the next wake, not of this one.
    for fn in tuple(_hooks):
        try:
            fn()
        except BaseException as e:  # SystemExit in a hook is a failure too
            raise HookFailed(f"hook {_name(fn)} raised {type(e).__name__}: {e}") from e


def _name(fn: Hook) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
