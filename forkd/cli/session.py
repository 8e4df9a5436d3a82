"""What every verb shares: the global options, the connection they lead to, and how a failure is shown."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import typer
from typer.core import TyperCommand, TyperGroup

from forkd.cli import output
from forkd.config import default_data_dir
from forkd.errors import ForkdError

if TYPE_CHECKING:
    from forkd.client.controller import Controller

GLOBAL_OPTIONS = ("--daemon-url", "--daemon-token", "--data-dir")


class Refused(ForkdError):
    """The command itself says no."""

    code = "refused"


@dataclass
class Settings:
    url: str | None = None
    token: str | None = None
    data_dir: Path | None = None
    passed: list[str] | None = None  # what came after `--`, for the verbs that hand it on


def settings(ctx: typer.Context) -> Settings:
    return ctx.ensure_object(Settings)


def data_dir(ctx: typer.Context) -> Path:
    return (settings(ctx).data_dir or default_data_dir()).absolute()


def connect(ctx: typer.Context) -> Controller:
    """A client of the daemon that was named, or of this user's private one, started if need be."""
    from forkd.client.controller import Controller
    from forkd.client.private_daemon import ensure_daemon, find_daemon

    chosen, folder = settings(ctx), data_dir(ctx)
    if chosen.url:
        return Controller(chosen.url, chosen.token)
    if sys.stderr.isatty() and not find_daemon(folder):
        output.say(f"starting a private daemon in {folder}")
    return Controller(ensure_daemon(folder), chosen.token)


def connect_if_running(ctx: typer.Context) -> Controller | None:
    """The same, but nothing is started."""
    from forkd.client.controller import Controller
    from forkd.client.private_daemon import find_daemon

    url = settings(ctx).url or find_daemon(data_dir(ctx))
    return Controller(url, settings(ctx).token) if url else None


class Root(TyperGroup):
    """The whole command: global options may stand anywhere before `--`, and errors become one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, hoisted(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForkdError as e:
            output.error(str(e), e.hint)
        except KeyboardInterrupt:
            output.say("forkd: interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of our output left, as `head` does: not worth a word.
            sys.stderr.close()
        except (RuntimeError, URLError) as e:
            if not hasattr(e, "problem"):  # neither of the client's two roots: a defect, so let it be seen
                raise
            output.error(e.problem, getattr(e, "hint", None))
        raise typer.Exit(1)


class Passing(TyperCommand):
    """A verb that hands what follows `--` on, untouched."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.ensure_object(Settings).passed = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


def hoisted(args: list[str]) -> list[str]:
    """Global options first, wherever they stood, so that they work before and after the verb."""
    end = args.index("--") if "--" in args else len(args)
    front: list[str] = []
    rest: list[str] = []
    words = iter(args[:end])
    for word in words:
        if word in GLOBAL_OPTIONS:
            front += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.startswith(tuple(f"{name}=" for name in GLOBAL_OPTIONS)):
            front.append(word)
        else:
            rest.append(word)
    return front + rest + args[end:]
