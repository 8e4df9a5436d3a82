"""What a command prints: results to stdout, everything else to stderr.

Listings are plain aligned columns, so that they can be piped; only progress is drawn, and only on a terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress

TICK, CROSS, DASH = "✓", "✗", "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86400, "d"), (3600, "h"), (60, "m"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def error(problem: str, hint: str | None = None) -> None:
    say(f"forkd: {problem}")
    if hint:
        say(f"  hint: {hint}")


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    lines = [list(headers), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def shown(cell: object) -> str:
    """One cell; what a guest had a hand in must not steer the terminal."""
    if cell is None or cell == "":
        return DASH
    return "".join(c if c.isprintable() else "?" for c in str(cell))


def size(count: float | None) -> str | None:
    if count is None:
        return None
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def age(since_unix: float | None) -> str | None:
    if not since_unix:
        return None
    secs = max(0, int(time.time() - since_unix))
    for length, letter in _AGES:
        if secs >= length:
            return f"{secs // length}{letter}"
    return f"{secs}s"


class Activity:
    """Long work: a spinner with the time so far on a terminal, plain lines elsewhere.

    Serves as the progress display of an image build too.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._stack = ExitStack()
        self._display: Progress | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._draw()
        else:
            say(f"{self._title} ...")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None:
            say(f"{self._title}: done in {time.monotonic() - self._started:.1f} s")

    def stage(self, name: str) -> None:
        if self._display is None:
            say(f"  {name}")
        else:
            self._update(name)
            self._display.console.print(f"  {name}", markup=False, highlight=False)

    def line(self, text: str) -> None:
        if self._display is not None:
            self._update(shown(text))

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._display = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._stack.enter_context(self._display)
        self._task = self._display.add_task(self._title, total=None, detail="")

    def _update(self, detail: str) -> None:
        assert self._display is not None
        room = max(10, self._display.console.width - len(self._title) - 16)
        self._display.update(self._task, detail=detail[:room])
