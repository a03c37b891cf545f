"""The tree of errors, and the exit code that each one ends a command with.

    HsxError                      1  a finding
    ├── UsageError                2  a wrong command line or configuration
    │   ├── DatasetError          2  the dataset cannot be used as it is
    │   └── SpecError             2  a run specification or a message on the wire is malformed
    ├── ConnectionFailed          3  the host cannot be reached or is not the host it was
    │   ├── HostKeyError          3  its key is unknown or has changed
    │   └── LinkLost              3  the link died; whether the remote side acted is UNKNOWN
    ├── DeadlineExceeded          4  something took longer than it may
    ├── Refused                   5  a precondition does not hold; nothing was done
    │   ├── PreflightError        5  the run would fail or produce wrong data
    │   ├── IdentityError         5  the store was made from something else
    │   └── LockedError           5  somebody else holds the store
    ├── RemoteError               1  the remote side answered with an error of its own
    └── StoreError                1  the store on disk is damaged

Every message says what happened, why, and what to do next, in one line.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What a command's exit status means (documented in cli.md, tested)."""

    OK = 0
    FINDING = 1
    USAGE = 2
    CONNECTION = 3
    TIMEOUT = 4
    REFUSED = 5
    INTERRUPTED = 130


class HsxError(Exception):
    """An error that a user can act on.

    Args:
        what: what happened, in a few words.
        why: the cause, as far as it is known.
        next_step: what the user can do about it.
    """

    exit_code = ExitCode.FINDING

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        self.what = what
        self.why = why
        self.next_step = next_step
        super().__init__(what, why, next_step)

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.next_step:
            text += f". {self.next_step[0].upper()}{self.next_step[1:]}"
        return " ".join(text.split())

    def to_json(self) -> dict[str, str]:
        """The form in which an error crosses the wire."""
        return {"kind": type(self).__name__, "what": self.what, "why": self.why, "next": self.next_step}


class UsageError(HsxError):
    """A wrong command line or configuration."""

    exit_code = ExitCode.USAGE


class DatasetError(UsageError):
    """The dataset cannot be used as it is."""


class SpecError(UsageError):
    """A run specification or a message on the wire is malformed."""


class ConnectionFailed(HsxError):
    """The host cannot be reached, or is not the host it was."""

    exit_code = ExitCode.CONNECTION


class HostKeyError(ConnectionFailed):
    """The host's key is unknown or has changed."""


class LinkLost(ConnectionFailed):
    """The link died; whether the remote side acted is unknown. Ask again: every verb is safe to repeat."""


class DeadlineExceeded(HsxError):
    """Something took longer than it may."""

    exit_code = ExitCode.TIMEOUT


class Refused(HsxError):
    """A precondition does not hold; nothing was done."""

    exit_code = ExitCode.REFUSED


class PreflightError(Refused):
    """The run would fail or produce wrong data."""


class IdentityError(Refused):
    """The store was made from another target, dataset or tokenizer."""


class LockedError(Refused):
    """Somebody else holds the store."""


class RemoteError(HsxError):
    """The remote side answered with an error of its own."""


class StoreError(HsxError):
    """The store on disk is damaged."""


def _tree(cls: type[HsxError]) -> dict[str, type[HsxError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


def from_json(data: object) -> HsxError:
    """Rebuild an error that crossed the wire; an unknown kind becomes a RemoteError."""
    if not isinstance(data, dict):
        return RemoteError("the host answered with a malformed error")
    cls = _tree(HsxError).get(str(data.get("kind")), RemoteError)
    return cls(str(data.get("what", "unknown error")), str(data.get("why", "")), str(data.get("next", "")))
