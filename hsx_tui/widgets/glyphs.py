"""The symbols that the screen is drawn with, in two sets, and the colours that go with each tone.

All of the first set are one cell wide in Rich, but some are "ambiguous" in East Asian fonts; the second set
is plain ASCII. A status is always symbol, word and colour together, never colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsx_tui.model.status import Tone

STYLE: dict[Tone, str] = {
    Tone.OK: "$success",
    Tone.BUSY: "$primary",
    Tone.WARN: "$warning",
    Tone.BAD: "bold $error",
    Tone.IDLE: "",
    Tone.WAIT: "$text-muted",
    Tone.UNKNOWN: "$secondary",
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """``symbol`` by tone; ``eighths``: how the end of a bar is drawn, least first; ``rule``: a border's
    line.
    """

    ascii: bool
    symbol: dict[Tone, str]
    full: str
    eighths: str
    soft: str
    empty: str
    rule: str
    dot: str
    cut: str
    plus_minus: str
    thin: str
    degree: str

    @property
    def symbol_bad(self) -> str:
        """The symbol of what is broken or out of date."""
        return self.symbol[Tone.BAD]


UNICODE = Glyphs(
    ascii=False,
    symbol={
        Tone.OK: "●", Tone.BUSY: "◐", Tone.WARN: "▲", Tone.BAD: "✖", Tone.IDLE: "○", Tone.WAIT: "◌",
        Tone.UNKNOWN: "?",
    },
    full="█", eighths="▏▎▍▌▋▊▉", soft="▒", empty="░", rule="─", dot="·", cut="…",
    plus_minus="±", thin="\u2009", degree="°C",
)  # fmt: skip

ASCII = Glyphs(
    ascii=True,
    symbol={
        Tone.OK: "[OK]", Tone.BUSY: "[..]", Tone.WARN: "[!!]", Tone.BAD: "[XX]", Tone.IDLE: "[--]",
        Tone.WAIT: "[--]", Tone.UNKNOWN: "[??]",
    },
    full="#", eighths="", soft="=", empty=".", rule="-", dot="|", cut="~",
    plus_minus="+-", thin=",", degree="C",
)  # fmt: skip


def glyphs(ascii_only: bool) -> Glyphs:
    """The set for a terminal."""
    return ASCII if ascii_only else UNICODE
