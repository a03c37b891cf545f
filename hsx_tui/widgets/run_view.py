"""The Run panel: the bar, the counts, the rates, the ETA; before a run, the steps of the preparation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_tui.model.messages import StepState
from hsx_tui.model.runs import is_live
from hsx_tui.model.status import Status, Tone, run_eta, run_status
from hsx_tui.widgets.bars import stacked
from hsx_tui.widgets.glyphs import STYLE, Glyphs
from hsx_tui.widgets.numbers import about, duration, grouped, rate, size
from hsx_tui.widgets.rows import MUTED, Row, cells, labelled, status_parts
from hsx_tui.widgets.view import Drawn, Frame, age_row, panel_freshness, stale_rows

if TYPE_CHECKING:
    from hsx_tui.model.eta import Eta
    from hsx_tui.model.state import ConsoleState, DemoStep, Progress, RunState

COMPACT = 5
STEP_TONE = {
    StepState.PENDING: Tone.WAIT,
    StepState.ACTIVE: Tone.BUSY,
    StepState.DONE: Tone.OK,
    StepState.FAILED: Tone.BAD,
}


def run_view(state: ConsoleState, f: Frame) -> Drawn:
    """Draw the run."""
    run = state.run
    fresh = panel_freshness(run.seen_at, f)
    title: Row = [("Run", "bold"), (f"  {run.run}" if run.run else "", "")]
    title += [(f"  attempt {run.attempt}", MUTED)] if run.attempt is not None else []
    if not run.run or (run.progress is None and not run.state and state.demo_phase):
        return Drawn(title, age_row(fresh, f.g, "not started"), _before(state, f))
    stale = fresh.stale and is_live(run)
    right = age_row(fresh, f.g) if stale or not fresh.stale else [("ended", MUTED)]
    cause = stale_rows(state, fresh, run.at_iso, f) if stale else None
    room = f.height - len(cause or [])
    status = run_status(state, f.now, f.interval)
    rows = _compact(state, status, f) if room < COMPACT else _full(state, status, f)
    return Drawn(title, right, rows[:room], stale, cause)


def _before(state: ConsoleState, f: Frame) -> list[Row]:
    if not state.demo_phase:
        return [
            status_parts(Status(Tone.WAIT, "NO RUN"), f.g),
            [("nothing has been started on this host; x opens the run menu", MUTED)],
        ]
    if len(state.demo_phase) <= f.height:
        return [_step(s, f) for s in state.demo_phase]
    line: Row = []
    for step in state.demo_phase:
        tone = STEP_TONE[step.state]
        line += [("  " if line else "", ""), (f"{f.g.symbol[tone]} {step.name}", STYLE[tone])]
    active = [s for s in state.demo_phase if s.state in (StepState.ACTIVE, StepState.FAILED)]
    return [line, *(_step(s, f) for s in active[-(f.height - 1) :])]


def _step(step: DemoStep, f: Frame) -> Row:
    tone = STEP_TONE[step.state]
    row: Row = [(f"{f.g.symbol[tone]} {step.name:<18}", STYLE[tone])]
    if step.state is StepState.ACTIVE and step.since is not None:
        row += [(f"{duration(f.now - step.since)}  ", "")]
    return [*row, (step.detail, "$error" if step.state is StepState.FAILED else MUTED)]


def _full(state: ConsoleState, status: Status, f: Frame) -> list[Row]:
    run, progress = state.run, state.run.progress
    head = [*status_parts(status, f.g), *_phase(run)]
    if progress is None:
        return [head, [("no progress has been told yet", MUTED)], *_end(run)]
    speed = f"{rate(progress.samples_per_s, f.g)} samples/s   {rate(progress.tok_per_s, f.g)} tok/s"
    speed += f"   request {rate(progress.req_time_s, f.g)} s"
    tokens = f"{grouped(progress.tokens, f.g)} tokens"
    tokens += f" of {grouped(progress.tokens_total, f.g)}" if progress.tokens_total else ""
    return [
        head,
        _bar(progress, f.width, f.g),
        labelled("rows", *_counts(progress, f.g)),
        labelled("rate", (speed, "")),
        labelled("ETA", *_eta(state, f)),
        labelled("taken", (f"{tokens}   {size(progress.bytes)}   {_errors(progress)}", "")),
        *_end(run),
    ]


def _compact(state: ConsoleState, status: Status, f: Frame) -> list[Row]:
    run, progress = state.run, state.run.progress
    head = status_parts(status, f.g)
    if progress is None:
        return [[*head, *_phase(run)], *(_end(run) or [[("no progress has been told yet", MUTED)]])]
    room = f.width - cells(head) - 2
    head = [*head, ("  ", ""), *_bar(progress, max(20, room), f.g)]
    speed: Row = [
        (f"{rate(progress.samples_per_s, f.g)} samples/s  {rate(progress.tok_per_s, f.g)} tok/s  ", "")
    ]
    return [head, _counts(progress, f.g), *(_end(run) or [[*speed, ("ETA ", MUTED), *_eta(state, f)]])]


def _phase(run: RunState) -> Row:
    said = " ".join(t for t in (run.phase, run.phase_detail) if t)
    return [(f"   {said}", MUTED)] if said else []


def _bar(progress: Progress, width: int, g: Glyphs) -> Row:
    total = progress.total
    if not total:
        return [("the dataset has no rows yet", MUTED)]
    settled = (progress.done + progress.quarantined) / total
    finished = progress.finished / total
    percent = f" {_floored(finished):5.1f} %"
    parts = [(settled, "$success"), (finished - settled, "$success")]
    return [*stacked(parts, max(4, width - len(percent)), g), (percent, "bold")]


def _floored(fraction: float) -> float:
    """Per cent, never rounded up: 100.0 is said only when every row is finished."""
    return int(fraction * 1000) / 10


def _counts(progress: Progress, g: Glyphs) -> Row:
    row: Row = [(f"done {grouped(progress.done, g)}", ""), (f" / {grouped(progress.total, g)}", MUTED)]
    if progress.buffered:
        row += [(f"   + {grouped(progress.buffered, g)} not yet durable", "")]
    row += [
        ("   quarantined ", ""),
        (grouped(progress.quarantined, g), "$warning" if progress.quarantined else ""),
    ]
    return [*row, (f"   pending {grouped(progress.pending, g)}", "")]


def _errors(progress: Progress) -> str:
    return f"errors {progress.errors}"


def _eta(state: ConsoleState, f: Frame) -> Row:
    eta: Eta = run_eta(state, f.now)
    if is_live(state.run) and panel_freshness(state.run.seen_at, f).stale:
        return [("not known while the panel is stale", MUTED)]
    if eta.kind == "stalled":
        return [
            (f"{f.g.symbol[Tone.WARN]} STALLED", STYLE[Tone.WARN]),
            (f"  no sample finished for {duration(eta.quiet_s)}", ""),
        ]
    if eta.kind == "done":
        return [("nothing is left", "")]
    if eta.kind == "unknown" or eta.seconds is None or eta.plus_minus is None:
        return [("after some more samples" if is_live(state.run) else "not running", MUTED)]
    row: Row = [(about(eta.seconds), "bold"), (f" {f.g.plus_minus} {about(eta.plus_minus)}", "")]
    resumed = state.run.resumed_at_fraction
    if resumed:
        row += [(f"   resumed at {_floored(resumed):.1f} %", MUTED)]
    return row


def _end(run: RunState) -> list[Row]:
    if is_live(run) or not run.exit_error:
        return []
    return [[(run.exit_error, "$error")]]
