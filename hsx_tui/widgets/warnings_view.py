"""The Warnings panel: mismatches and other things that a person should see, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_tui.model.status import Tone
from hsx_tui.widgets.glyphs import STYLE
from hsx_tui.widgets.numbers import age, clock
from hsx_tui.widgets.rows import MUTED, Row
from hsx_tui.widgets.view import Drawn, Frame

if TYPE_CHECKING:
    from hsx_tui.model.state import ConsoleState, Warn

WIDE = 100


def warnings_view(state: ConsoleState, f: Frame) -> Drawn:
    """Draw the warnings."""
    warnings = state.warnings
    title: Row = [("Warnings", "bold"), (f"  {warnings.total}" if warnings.total else "", STYLE[Tone.WARN])]
    if warnings.mismatches:
        title += [(f"  mismatches {warnings.mismatches}, retried {warnings.retried}", MUTED)]
    if warnings.quarantined:
        title += [(f", quarantined {warnings.quarantined}", STYLE[Tone.WARN])]
    if warnings.seen_at is None:
        said = (
            "every dump so far was its sample's"
            if state.run.progress
            else "mismatches and warnings come here"
        )
        return Drawn(title, [("none yet", MUTED)], [[(said, MUTED)]])
    right: Row = [(f"newest {age(max(0.0, f.now - warnings.seen_at))} ago", MUTED)]
    newest = list(reversed(warnings.recent))
    rows = [_row(w, f) for w in newest[: f.height]]
    if warnings.total > f.height > 1:
        rows = [*rows[:-1], [(f"+{warnings.total - f.height + 1} older", MUTED)]]
    return Drawn(title, right, rows)


def _row(warn: Warn, f: Frame) -> Row:
    tone = Tone.BAD if warn.outcome == "quarantined" or warn.word.endswith("FAILED") else Tone.WARN
    row: Row = [
        (f"{clock(warn.at_iso) or '        '} ", MUTED),
        (f"{f.g.symbol[tone]} {warn.word}", STYLE[tone]),
    ]
    if warn.row is None:
        return [*row, (f"  {warn.text}", "")]
    row += [(f"  row {warn.row}", "bold"), (f"  {warn.cause}", STYLE[tone])]
    if warn.outcome:
        row += [(f"  {warn.outcome}", "")]
    if warn.got or warn.expected:
        row += [(f"  got {warn.got or '-'}, expected {warn.expected or '-'}", "")]
    if f.width < WIDE and (warn.got or warn.expected):
        return row  # there is no room for the meaning beside the numbers
    return [*row, (f"  {warn.text}", MUTED)] if warn.text != warn.cause else row
