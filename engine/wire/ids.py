"""Run ids, and the request ids that carry run, row and attempt.

A request id ends with '_' so that no id is a prefix of another: SGLang aborts by rid *prefix*.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.wire.errors import SpecError

PREFIX = "hsx-"
"""Requests whose hidden states are ours begin with this; nothing else does."""

MAX_ATTEMPT = 99

_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,39}\Z")
_RID = re.compile(r"hsx-([a-z0-9][a-z0-9-]{0,39})-(\d{8})-(\d{2})_\Z")


@dataclass(frozen=True, order=True)
class RequestId:
    """One attempt at one row of one run."""

    run: str
    row: int
    attempt: int

    def __str__(self) -> str:
        return f"{run_prefix(self.run)}{self.row:08d}-{self.attempt:02d}_"


def check_run(run: object) -> str:
    """Return ``run`` if it is a valid run id, else raise SpecError."""
    if not isinstance(run, str) or not _RUN.match(run):
        raise SpecError(
            f"bad run id {run!r}",
            "a run id is 1 to 40 of a-z, 0-9 and '-', not beginning with '-'",
            "choose another name",
        )
    return run


def run_prefix(run: str) -> str:
    """What every request id of ``run`` begins with. Not safe as an abort prefix: see RequestId."""
    return f"{PREFIX}{check_run(run)}-"


def rid(run: str, row: int, attempt: int) -> str:
    """The request id of an attempt (1 to 99) at a row (0 to 99,999,999)."""
    if not 0 <= row < 10**8 or not 1 <= attempt <= MAX_ATTEMPT:
        raise SpecError(f"row {row} or attempt {attempt} is out of range")
    return str(RequestId(run, row, attempt))


def parse_rid(text: str) -> RequestId | None:
    """Read a request id; None if it is not one of ours."""
    m = _RID.match(text)
    return RequestId(m[1], int(m[2]), int(m[3])) if m else None
