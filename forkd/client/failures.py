"""How a call to the daemon can fail, as two small trees.

ControllerError(RuntimeError)      the daemon answered, and not with success
  BadReply                         ... or with success, in a form that this client does not know
ConnectionFailed(URLError)         there was no whole answer; also an OSError
  TimedOut(…, TimeoutError)
  DaemonUnavailable                a private daemon could not be started
"""

from __future__ import annotations

import json
from typing import Any
from urllib.error import URLError

_SHOWN_CHARS = 500


class ControllerError(RuntimeError):
    """The daemon refused or failed. Switch on `status` and `code`; `hint` says what to do next."""

    def __init__(self, status: int, body: Any, url: str) -> None:
        self.status = status
        self.body = body
        self.url = url
        fields = body if isinstance(body, dict) else {}
        self.code: str | None = _text(fields.get("code"))
        self.hint: str | None = _text(fields.get("hint"))
        super().__init__(self._sentence())

    @property
    def problem(self) -> str:
        """What went wrong, without the status, the address and the hint."""
        if isinstance(self.body, dict) and (said := _text(self.body.get("error"))):
            return said
        shown = self.body if isinstance(self.body, str) else json.dumps(self.body)
        return shown[:_SHOWN_CHARS] if self.body else "no explanation"

    def _sentence(self) -> str:
        kind = f" {self.code}" if self.code else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.problem}{hint} [HTTP {self.status}{kind} from {self.url}]"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would rebuild from the message alone, and fail in another process.
        return type(self), (self.status, self.body, self.url)


class BadReply(ControllerError):
    """A success that this client cannot read."""

    def __init__(self, status: int, body: Any, url: str) -> None:
        super().__init__(status, body, url)
        self.code = "bad_reply"
        self.hint = "client and daemon may be of different versions: `forkd version` shows both"
        shown = (body if isinstance(body, str) else json.dumps(body))[:_SHOWN_CHARS]
        self.args = (f"unreadable reply [HTTP {status} from {url}]: {shown or 'empty'} ({self.hint})",)


class ConnectionFailed(URLError):
    """No whole answer came. `status` is set when the daemon vanished in the middle of one."""

    def __init__(self, url: str, problem: str, *, status: int | None = None, hint: str | None = None) -> None:
        super().__init__(problem)
        self.url = url
        self.problem = problem
        self.status = status
        self.hint = hint

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.problem}{hint} [{self.url}]"

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"status": self.status, "hint": self.hint}
        return type(self), (self.url, self.problem), state


class TimedOut(ConnectionFailed, TimeoutError):
    """The daemon did not answer in time. What was asked for may still happen."""


class DaemonUnavailable(ConnectionFailed):
    """A private daemon was needed and did not come up."""


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
