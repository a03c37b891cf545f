"""Messages into lines of the log, cleaned: this is the edge at which foreign log text comes in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx_tui.model.messages import Connection, Link, LogGap, Message, Notice, ServerLog, Step, StepState
from hsx_tui.model.status import Tone
from hsx_tui.text import clean

if TYPE_CHECKING:
    from hsx_tui.model.state import ConsoleState

# "[2026-11-30 20:28:52 TP0] ", "2026-11-30T20:28:52.123Z " and "20:28:52 ": the time is drawn in its own
# column.
_TIME = re.compile(
    r"\[?(?:\d{4}-\d\d-\d\d[ T])?(\d\d:\d\d:\d\d)(?:[.,]\d+)?Z?(?: ([A-Z]{2}\d[A-Z0-9 ]*))?\]?\s+"
)
_BAD = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback|exception)\b")
_WARN = re.compile(r"\b(WARN|WARNING|warning)\b")
_NAMES = {"server": "sglang", "engine": "extract", "console": "console"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """``time``: HH:MM:SS as the line itself had it, "" without one; all text is cleaned."""

    source: str
    text: str
    time: str = ""
    tone: Tone = Tone.IDLE


def log_lines(before: ConsoleState, message: Message, time: str) -> list[LogLine]:
    """The lines that ``message`` adds to the log; ``time`` (HH:MM:SS) is for those that the console says
    itself.

    ``before`` is the state before the message: only a change of the link is worth a line, not every retry.
    """
    if isinstance(message, ServerLog):
        return [foreign(line, _NAMES.get(message.source, "?")) for line in message.lines]
    if isinstance(message, LogGap):
        return [LogLine(_NAMES.get(message.source, "?"), _gap(message), time, Tone.WARN)]
    said = _said(before, message)
    return [] if said is None else [LogLine("console", said[0], time, said[1])]


def foreign(line: str, source: str) -> LogLine:
    """One raw line of a foreign log."""
    text = clean(line)
    time = ""
    m = _TIME.match(text)
    if m is not None:
        time, text = m[1], (f"{m[2]} " if m[2] else "") + text[m.end() :]
    tone = Tone.BAD if _BAD.search(text) else Tone.WARN if _WARN.search(text) else Tone.IDLE
    return LogLine(source, text, time, tone)


def _gap(gap: LogGap) -> str:
    what = [f"{gap.seconds:.0f} s gap"] if gap.seconds is not None else []
    what += [f"{gap.lines} lines skipped"] if gap.lines is not None else []
    return f"-- {', '.join(what) or 'gap'} --"


def _said(before: ConsoleState, message: Message) -> tuple[str, Tone] | None:
    if isinstance(message, Connection) and message.state is not before.connection.link:
        tone = {Link.CONNECTED: Tone.OK, Link.CONNECTING: Tone.BUSY, Link.LOST: Tone.BAD}[message.state]
        return _joined(f"link {message.state}", message.cause), tone
    if isinstance(message, Notice):
        tone = {"error": Tone.BAD, "warning": Tone.WARN}.get(message.level, Tone.IDLE)
        return clean(message.text), tone
    if isinstance(message, Step):
        known = next((s.state for s in before.demo_phase if s.name == clean(message.name, 40)), None)
        if known is message.state or message.state is StepState.PENDING:
            return None
        tone = Tone.BAD if message.state is StepState.FAILED else Tone.IDLE
        return _joined(f"{clean(message.name, 40)}: {message.state}", message.detail), tone
    return None


def _joined(what: str, why: str) -> str:
    return f"{what}: {clean(why)}" if why else what
