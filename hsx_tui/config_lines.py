"""Where a key stands in a TOML text, for messages: tomllib keeps no positions."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))


def line_of(text: str, path: Sequence[str]) -> int | None:
    """The line (from 1) of the key ``path``, or of the nearest table above it; None if neither is found.

    A line inside a multi-line value is not taken for a key: what stands before a key is a whole document.
    """
    best: tuple[int, int] | None = None
    table: tuple[str, ...] = ()
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            here = _split(header[1])
        elif key is not None:
            here = (*table, *_split(key[1]))
        else:
            continue
        depth = min(len(here), len(path))
        matches = here[:depth] == tuple(path[:depth]) and (best is None or depth > best[0])
        if (header is not None or matches) and not _whole(lines[: number - 1]):
            continue
        if header is not None:
            table = here
        if matches:
            best = (depth, number)
    return best[1] if best else None


def _whole(lines: list[str]) -> bool:
    try:
        tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def line_in(message: str) -> int | None:
    """The line that an error of tomllib names."""
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else None
