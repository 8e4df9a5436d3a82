"""Every way a request can fail, as one tree.

    ForkdError(code, status)
      BadRequest 400          BadName, BadField, BadJson
      Unauthorized 401
      Forbidden 403           BadHost
      NotFound 404            NoSnapshot, NoSandbox, NoImage
      WrongMethod 405         TooSlow 408
      Conflict 409            TagTaken, InUse, NotReady, Corrupt, SandboxDead, Unsupported, KeyReused
      TooLarge 413            WrongContentType 415
      Busy 503                NoSlot, AuditFailed
      NoSpace 507
      EngineFailed 500        carries the step that failed
        AgentFailed 500       the guest did not answer, or not in its protocol

`code` is what programs switch on and never changes; `str(error)` and `hint`
are for people. The daemon turns these into HTTP in one place and the client
rebuilds the same classes from `code`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ForkdError(Exception):
    """The root. `hint` says what to do next."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def as_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = {"error": str(self), "code": self.code}
        if self.hint:
            body["hint"] = self.hint
        return body


class BadRequest(ForkdError):
    code = "bad_request"
    status = 400


class BadName(BadRequest):
    code = "bad_name"

    def __init__(self, kind: str, value: object, rule: str) -> None:
        super().__init__(f"{kind} {_shown(value)} is not allowed", hint=f"a {kind} is {rule}")


class BadField(BadRequest):
    code = "bad_field"

    def __init__(self, field: str, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"field {field!r}: {problem}", hint=hint)
        self.field = field


class BadJson(BadRequest):
    code = "bad_json"


class Unauthorized(ForkdError):
    code = "unauthorized"
    status = 401


class Forbidden(ForkdError):
    code = "forbidden"
    status = 403


class BadHost(Forbidden):
    """A web page, or a name that was made to point here, is asking."""

    code = "bad_host"


class NotFound(ForkdError):
    code = "not_found"
    status = 404


class NoSnapshot(NotFound):
    code = "no_snapshot"

    def __init__(self, tag: object) -> None:
        super().__init__(f"snapshot {tag} not found", hint="`forkd snapshot ls` lists what there is")


class NoSandbox(NotFound):
    code = "no_sandbox"

    def __init__(self, sandbox_id: object) -> None:
        super().__init__(f"sandbox {sandbox_id} not found", hint="`forkd ls` lists what is alive")


class NoImage(NotFound):
    code = "no_image"

    def __init__(self, name: object) -> None:
        super().__init__(f"image {name} not found", hint="`forkd image build <recipe>` makes one")


class WrongMethod(ForkdError):
    code = "wrong_method"
    status = 405


class TooSlow(ForkdError):
    code = "too_slow"
    status = 408


class Conflict(ForkdError):
    code = "conflict"
    status = 409


class TagTaken(Conflict):
    code = "tag_taken"


class InUse(Conflict):
    code = "in_use"


class NotReady(Conflict):
    code = "not_ready"


class Corrupt(Conflict):
    """A file on disk is not what its manifest says. Never started from, never deleted by itself."""

    code = "corrupt"


class SandboxDead(Conflict):
    code = "sandbox_dead"


class Unsupported(Conflict):
    """This host cannot do what was asked; nothing less is given instead."""

    code = "unsupported"


class KeyReused(Conflict):
    """One Idempotency-Key, two different requests."""

    code = "key_reused"


class TooLarge(ForkdError):
    code = "too_large"
    status = 413


class WrongContentType(ForkdError):
    code = "wrong_content_type"
    status = 415


class Busy(ForkdError):
    code = "busy"
    status = 503


class NoSlot(Busy):
    code = "no_slot"


class AuditFailed(Busy):
    """What cannot be recorded is not done."""

    code = "audit_failed"


class NoSpace(ForkdError):
    code = "no_space"
    status = 507


class EngineFailed(ForkdError):
    """A step of the engine failed; the step is named, the cause chained."""

    code = "engine_failed"
    status = 500

    def __init__(self, step: str, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{step}: {problem}", hint=hint)
        self.step = step


class AgentFailed(EngineFailed):
    code = "agent_failed"


def by_code() -> dict[str, type[ForkdError]]:
    """Every class of the tree under its code, for clients that rebuild errors from a reply."""
    found: dict[str, type[ForkdError]] = {}
    todo: list[type[ForkdError]] = [ForkdError]
    while todo:
        cls = todo.pop()
        found.setdefault(cls.code, cls)
        todo.extend(cls.__subclasses__())
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
