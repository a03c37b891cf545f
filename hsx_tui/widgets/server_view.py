"""The Server panel: its health, what it does, and while it loads the phases with their times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_tui.model.status import Status, Tone, server_status
from hsx_tui.widgets.bars import bar
from hsx_tui.widgets.glyphs import STYLE
from hsx_tui.widgets.numbers import UNKNOWN, duration, rate
from hsx_tui.widgets.rows import MUTED, Row, labelled, status_parts
from hsx_tui.widgets.view import Drawn, Frame, age_row, panel_freshness, stale_rows

if TYPE_CHECKING:
    from hsx_tui.model.loading import Loading, Phase
    from hsx_tui.model.state import ConsoleState, ServerState

COMPACT = 4


def server_view(state: ConsoleState, f: Frame) -> Drawn:
    """Draw the server."""
    server = state.server
    # Before the first facts the log alone tells of the server.
    seen = [
        t for t in (server.seen_at, server.loading.line_at if not server.ready else None) if t is not None
    ]
    fresh = panel_freshness(max(seen, default=None), f)
    status = server_status(state, f.now, f.interval)
    title: Row = [("Server", "bold")]
    if not server.configured and not server.loading.begun:
        rows: list[Row] = [status_parts(status, f.g), [("no server has been seen on this host yet", MUTED)]]
        return Drawn(title, age_row(fresh, f.g), rows)
    cause = stale_rows(state, fresh, server.at_iso, f) if fresh.stale else None
    room = f.height - len(cause or [])
    loading = server.loading
    if not server.ready and (loading.begun or loading.failed) and not loading.fired:
        rows = (
            _loading_compact(server, status, f) if room < COMPACT + 3 else _loading(server, status, f, room)
        )
    else:
        rows = _serving_compact(server, status, f) if room < COMPACT else _serving(server, status, f)
    return Drawn(title, age_row(fresh, f.g), rows[:room], fresh.stale, cause)


def _serving(server: ServerState, status: Status, f: Frame) -> list[Row]:
    took = server.loading.total(f.now) if server.loading.fired else None
    first = [
        *status_parts(status, f.g),
        (f"   loading took {duration(took)}" if took is not None else "", MUTED),
    ]
    return [
        labelled("state", *first),
        labelled("model", (server.model or UNKNOWN, "")),
        labelled(
            "url",
            (server.url or UNKNOWN, ""),
            (f"   version {server.version}" if server.version else "", MUTED),
        ),
        _queue(server),
        labelled("speed", (f"{rate(server.throughput, f.g)} generated tok/s", "")),
        _last_word(server),
    ]


def _serving_compact(server: ServerState, status: Status, f: Frame) -> list[Row]:
    if server.error:
        return [[*status_parts(status, f.g), (f"  {server.error}", "$error")], _facts(server)]
    return [[*status_parts(status, f.g), ("   ", ""), *_queue(server, 0)], _facts(server)]


def _facts(server: ServerState) -> Row:
    return [(server.model or UNKNOWN, ""), (f"   {server.url}", MUTED)]


def _queue(server: ServerState, label: int = 8) -> Row:
    def shown(value: int | None) -> str:
        return UNKNOWN if value is None else str(value)

    usage = UNKNOWN if server.token_usage is None else f"{server.token_usage:.0%}"
    queue = f"running {shown(server.running)}   waiting {shown(server.waiting)}   kv cache {usage}"
    return labelled("queue" if label else "", (queue, ""), width=label)


def _last_word(server: ServerState) -> Row:
    if server.error:
        return labelled("error", (server.error, "$error"))
    return labelled("last", (server.loading.last or UNKNOWN, MUTED))


def _loading(server: ServerState, status: Status, f: Frame, room: int) -> list[Row]:
    loading = server.loading
    head = [*status_parts(status, f.g), (f"   {duration(loading.total(f.now))} so far", "")]
    if server.model:
        head += [(f"   {server.model}", MUTED)]
    rows = [head, *(_phase(p, loading, f) for p in loading.phases)]
    if loading.failed and len(rows) >= room:
        rows = [head, *(_phase(p, loading, f) for p in loading.phases if p.state == "running")]
    tail: Row = [(loading.failed, "$error")] if loading.failed else [(loading.last, MUTED)]
    return [*rows[: room - 1], tail] if len(rows) < room or loading.failed else rows


def _phase(phase: Phase, loading: Loading, f: Frame) -> Row:
    tone = {"done": Tone.OK, "running": Tone.BUSY, "pending": Tone.WAIT}[phase.state]
    if loading.failed and phase.state == "running":
        tone = Tone.BAD
    style = STYLE[tone] if phase.state != "pending" else MUTED
    row: Row = [
        (f"{f.g.symbol[tone]} ", style),
        (f"{phase.name:<10}", "" if phase.state != "pending" else MUTED),
    ]
    if phase.state == "running" and phase.fraction is not None:
        row += [*bar(phase.fraction, 16, f.g), (f" {phase.fraction:4.0%}  ", "")]
    elapsed = loading.elapsed(phase, f.now)
    return [*row, (duration(elapsed) if elapsed is not None else "", "")]


def _loading_compact(server: ServerState, status: Status, f: Frame) -> list[Row]:
    loading = server.loading
    index = loading.current
    where = ""
    if index is not None:
        phase = loading.phases[index]
        where = f"  {index + 1}/{len(loading.phases)} {phase.name} "
    first: Row = [*status_parts(status, f.g), (where, ""), *bar(loading.fraction, 18, f.g)]
    first += [(f"  {duration(loading.total(f.now))} so far", "")]
    said = (loading.failed, "$error") if loading.failed else (loading.last, MUTED)
    return [first, [(f"{server.model}  " if server.model else "", ""), said]]
