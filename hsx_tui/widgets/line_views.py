"""The single lines around the panels: header, problem, footer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_tui import actions
from hsx_tui.actions import Action, Scope
from hsx_tui.model.status import link_status, run_status, server_status
from hsx_tui.widgets.rows import MUTED, Row, status_parts

if TYPE_CHECKING:
    from hsx_tui.model.state import ConsoleState
    from hsx_tui.widgets.view import Frame

WIDE = 100


def header_row(state: ConsoleState, f: Frame, version: str) -> Row:
    """Who, where, and the three states that matter."""
    connection = state.connection
    wide = f.width >= WIDE
    gap = ("   " if wide else "  ", "")
    row: Row = [(f" hsx {version} " if wide else " hsx ", "bold"), gap]
    row += [("host " if wide else "", MUTED), (f"{connection.host or state.host.hostname or '?'} ", "")]
    row += status_parts(link_status(state), f.g)
    if wide and connection.rtt_ms is not None:
        row += [(f" {connection.rtt_ms:.0f} ms", MUTED)]
    row += [
        gap,
        ("server " if wide else "srv ", MUTED),
        *status_parts(server_status(state, f.now, f.interval), f.g),
    ]
    row += [gap, ("run ", MUTED), (f"{state.run.run} " if wide and state.run.run else "", "")]
    return [*row, *status_parts(run_status(state, f.now, f.interval), f.g)]


def problem_rows(state: ConsoleState, f: Frame) -> list[Row]:
    """What went wrong, why, and what to do; none without a problem."""
    problem = state.problem
    if problem is None:
        return []
    dismiss = actions.key_name(actions.BY_ID["app.dismiss"].key)
    first: Row = [
        (f" {f.g.symbol_bad} {problem.what}", "bold $error"),
        (f": {problem.why}" if problem.why else "", ""),
    ]
    return [
        first,
        [(f"   {problem.next_step}   " if problem.next_step else "   ", ""), (f"({dismiss} dismiss)", MUTED)],
    ]


def footer_parts(f: Frame, paused: bool) -> list[tuple[Action, str, str]]:
    """The actions that the footer shows, with the key and the label as they are drawn."""
    shown = []
    for action in actions.in_scope(Scope.GLOBAL):
        # While the log is paused, following is what the user may want, and the other way round.
        hidden = {"log.pause": paused, "log.follow": not paused}.get(action.id, False)
        if action.footer and not hidden:
            shown.append((action, actions.key_name(action.key, f.g.ascii), _plain(action.label, f)))
    return shown


def _plain(label: str, f: Frame) -> str:
    return label.replace("…", "...") if f.g.ascii else label
