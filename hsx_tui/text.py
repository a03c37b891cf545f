"""Cleaning of foreign text: every string from a host passes here once, where it comes in.

A terminal obeys what it is sent, and Textual sends most control characters on. A log line can so clear the
screen, write the clipboard or forge another line; after ``clean`` it cannot.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

from engine.wire.errors import from_json

if TYPE_CHECKING:
    from engine.wire.errors import HsxError

LIMIT = 2000
"""The longest line that is kept, in characters, with the mark that says how much was cut."""

MAX_DEPTH = 12
"""Nested JSON from a host is read down to here."""

# Whole control sequences, whose parameters would be left behind as litter if only the ESC went. An
# unterminated string sequence is not matched: swallowing the rest of the line would let a host hide text.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-Z\\^-~]"  # two and three bytes
)
# Joiners and variation selectors change how wide a terminal draws their neighbours: drawn text would not line
# up.
_WIDTH_CHANGERS = re.compile("[\u200b-\u200d\u2060\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_RAW_FACTOR = 8
_MARK_ROOM = 32


def clean(text: str, limit: int = LIMIT) -> str:
    """One line of printable text: no control characters, no bidi controls, at most ``limit`` characters.

    Escape sequences go, of a line redrawn with carriage returns the last state stays, tabs become spaces, and
    what else cannot be printed becomes U+FFFD. ``clean(clean(x)) == clean(x)``.
    """
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    total = len(text)
    raw = text[: limit * _RAW_FACTOR]
    if not (raw.isascii() and raw.isprintable()):
        raw = _SEQUENCE.sub("", raw).rstrip("\r\n")
        raw = raw.rsplit("\r", 1)[-1].replace("\t", "    ")
        raw = _WIDTH_CHANGERS.sub("", raw)
        if not raw.isprintable():
            raw = "".join(map(_printable, raw))
    unseen = max(0, total - limit * _RAW_FACTOR)
    if len(raw) + unseen <= limit:
        return raw
    kept = limit - _MARK_ROOM
    return raw[:kept] + f" …(+{len(raw) + unseen - kept:,} chars)".replace(",", " ")


def clean_value(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The same JSON value with every string in it cleaned, keys too; deeper than ``depth`` becomes None."""
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth <= 0:
        return None
    if isinstance(value, dict):
        return {clean(str(k)): clean_value(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean_value(v, depth - 1) for v in value]
    return clean(repr(value))


def host_error(data: object) -> HsxError:
    """An error that a host sent, rebuilt with its text cleaned."""
    error = from_json(data)
    return type(error)(clean(error.what), clean(error.why), clean(error.next_step))


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char == "\n" or unicodedata.category(char) == "Zs" else "\ufffd"
