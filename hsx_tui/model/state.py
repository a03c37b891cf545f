"""What the screen shows: one frozen value, made anew by ``reduce`` for every message.

Times: ``*_at`` floats are the console's monotonic seconds; ``*_epoch`` floats are seconds since 1970 by the
host's own clock, read from its events; ``*_iso`` strings are the host's, as it wrote them. ``Clock`` ties the
first two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hsx_tui.model.eta import Track
from hsx_tui.model.loading import Loading
from hsx_tui.model.messages import Link, StepState

MAX_WARNINGS = 200


@dataclass(frozen=True, slots=True)
class Clock:
    """``offset``: the host's epoch seconds minus the console's monotonic seconds; None before the first sign
    of it.
    """

    offset: float | None = None

    def host_now(self, now: float) -> float | None:
        """The host's clock at the console's ``now``."""
        return None if self.offset is None else now + self.offset


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """The link. ``retry_at``: when the next try is due; ``since``: when the state began."""

    link: Link = Link.CONNECTING
    host: str = ""
    cause: str = ""
    since: float | None = None
    retry_at: float | None = None
    rtt_ms: float | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system, in bytes; ``error`` where it could not be read."""

    path: str
    total: float | None = None
    free: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: per cent, MiB, watts, degrees Celsius; None where the driver says N/A."""

    index: int
    name: str = ""
    util: float | None = None
    mem_used_mib: float | None = None
    mem_total_mib: float | None = None
    power_w: float | None = None
    temp_c: float | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """The machine, from HostFacts. Memory and disks in bytes."""

    seen_at: float | None = None
    at_iso: str = ""
    hostname: str = ""
    uptime_s: float | None = None
    load: tuple[float, ...] = ()
    cpus: int | None = None
    mem_total: float | None = None
    mem_available: float | None = None
    shm: Disk | None = None
    disks: tuple[Disk, ...] = ()
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerState:
    """The inference server, from HostFacts and from its log. ``configured``: facts have named one."""

    seen_at: float | None = None
    at_iso: str = ""
    configured: bool = False
    url: str = ""
    ready: bool = False
    error: str = ""
    model: str = ""
    version: str = ""
    running: int | None = None
    waiting: int | None = None
    token_usage: float | None = None
    throughput: float | None = None
    loading: Loading = field(default_factory=Loading)


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows and tokens of a run. ``done``: durable; ``buffered``: checked, not yet durable; all counts are of
    rows.
    """

    done: int = 0
    buffered: int = 0
    quarantined: int = 0
    pending: int = 0
    tokens: int | None = None
    tokens_total: int | None = None
    samples_per_s: float | None = None
    tok_per_s: float | None = None
    req_time_s: float | None = None
    bytes: float | None = None
    errors: int = 0

    @property
    def total(self) -> int:
        """All rows of the dataset. Buffered rows are among the pending ones until they are durable."""
        return self.done + self.quarantined + self.pending

    @property
    def finished(self) -> int:
        """Rows that need no more work once they are durable; quarantined ones count."""
        return min(self.total, self.done + self.quarantined + self.buffered)


@dataclass(frozen=True, slots=True)
class RunState:
    """The run that the console follows.

    Attributes:
        state: one of engine.wire.verbs.STATES, "" before the first status.
        phase: the engine's own word for what it is doing.
        last_seq: the newest event that was taken.
        gaps: (first, last) sequence numbers that never came.
        resumed_at_fraction: how much was finished when this attempt began, where there was an attempt before.
    """

    run: str = ""
    seen_at: float | None = None
    at_iso: str = ""
    attempt: int | None = None
    state: str = ""
    pid: int | None = None
    started_iso: str = ""
    heartbeat_age_s: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    exit_error: str = ""
    output: str = ""
    phase: str = ""
    phase_detail: str = ""
    paused: bool = False
    finished: bool = False
    progress: Progress | None = None
    last_seq: int = 0
    gaps: tuple[tuple[int, int], ...] = ()
    track: Track = field(default_factory=Track)
    resumed_at_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Warn:
    """One line of the warnings panel. ``word``: MISMATCH, WARNING ...; the rest only for a mismatch."""

    word: str
    text: str
    at_iso: str = ""
    row: int | None = None
    cause: str = ""
    got: str = ""
    expected: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Warnings:
    """The newest ``MAX_WARNINGS``, oldest first, and how many there were of what."""

    recent: tuple[Warn, ...] = ()
    total: int = 0
    mismatches: int = 0
    retried: int = 0
    quarantined: int = 0
    seen_at: float | None = None


@dataclass(frozen=True, slots=True)
class LogCursor:
    """How much log there was. The lines themselves are in the log's own ring, not here."""

    lines: int = 0
    seen_at: float | None = None


@dataclass(frozen=True, slots=True)
class DemoStep:
    """A step of the preparation. ``since``: when its present state began."""

    name: str
    state: StepState
    detail: str = ""
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What went wrong with something that was asked for; stays until it is dismissed."""

    what: str
    why: str = ""
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class ConsoleState:
    """Everything that the screen shows, but for the log's lines."""

    connection: ConnectionState = ConnectionState()
    host: HostState = HostState()
    server: ServerState = ServerState()
    run: RunState = RunState()
    warnings: Warnings = Warnings()
    log: LogCursor = LogCursor()
    demo_phase: tuple[DemoStep, ...] = ()
    problem: Problem | None = None
    notice: str = ""
    clock: Clock = Clock()
