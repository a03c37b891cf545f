"""What the services tell the model: past-tense facts, one small dataclass each.

Strings in them may come straight from a host: ``reduce`` and the log cleaning are the edge at which they are
cleaned.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LogSource = Literal["server", "engine", "console"]
Level = Literal["info", "warning", "error"]


class Link(enum.StrEnum):
    """How the console stands with the host."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"


class StepState(enum.StrEnum):
    """How far a step of a preparation is."""

    PENDING = "pending"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Connection:
    """The link changed, or failed once more.

    ``retry_in_s``: seconds to the next try, None when none is planned. ``host``: the name it is configured
    under; "" leaves the known one. ``rtt_ms``: the round trip, where it was measured. ``attempt``: how many
    tries failed.
    """

    state: Link
    cause: str = ""
    retry_in_s: float | None = None
    host: str = ""
    rtt_ms: float | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class HostFactsSeen:
    """A HostFacts object of the verbs ``observe`` or ``probe`` (engine/wire/verbs.py)."""

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunStatusSeen:
    """A RunStatus object of the verbs ``start``, ``status`` and ``abort``."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One decoded line of events.jsonl of ``run``. ``attempt``: whose file it was read from, where known."""

    run: str
    event: Mapping[str, Any]
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class EventsGap:
    """The services know that events first..last of ``run`` cannot be had any more."""

    run: str
    first_missing: int
    last_missing: int


@dataclass(frozen=True, slots=True)
class ServerLog:
    """Lines of a log, without their newlines. Of source "server" they also drive the loading phases."""

    lines: Sequence[str]
    source: LogSource = "server"


@dataclass(frozen=True, slots=True)
class LogGap:
    """Some of a log was not read: lines that were skipped, or seconds without a link. Drawn as a line of its
    own.
    """

    source: LogSource
    lines: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the preparation, by name; steps appear in the order in which they were first named."""

    name: str
    state: StepState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person should read. "error" stays on screen until it is dismissed."""

    level: Level
    text: str


Message = (
    Connection | HostFactsSeen | RunStatusSeen | EngineEvent | EventsGap | ServerLog | LogGap | Step | Notice
)
