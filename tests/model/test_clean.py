"""Foreign text: whatever a host sends, one printable line comes out."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hsx_tui.text import LIMIT, clean, clean_value

CONTROLS = {chr(c) for c in (*range(0x20), *range(0x7F, 0xA0))}
BIDI = set("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c")

nasty = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("\x1b\x9b\x9d\x90\x07\r\n\t\x7f\u202e\u2028\ufeff\u200d\ufe0f[]m;?\\0123"),
    ),
    max_size=300,
)


@given(nasty)
def test_output_is_one_printable_line(raw: str) -> None:
    out = clean(raw)
    assert not CONTROLS & set(out)
    assert not BIDI & set(out)
    assert all(c.isprintable() for c in out)
    assert 0 <= cell_len(out) <= 2 * LIMIT
    assert clean(out) == out


@given(nasty, st.integers(64, 200))
def test_never_longer_than_the_limit(raw: str, limit: int) -> None:
    assert len(clean(raw * 5, limit)) <= limit


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        ("plain text", "plain text"),
        ("AAA\x1b[2JBBB", "AAABBB"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;ZXZpbA==\x1b\\b", "ab"),
        ("a\x9b2Jb", "ab"),
        ("a\x9d52;c;AAAA\x9cb", "ab"),
        ("10%\r50%\r100%", "100%"),
        ("line\r\n", "line"),
        ("a\tb", "a    b"),
        ("a\x00b\x7fc", "a\ufffdb\ufffdc"),
        ("user\u202egnp.exe", "user\ufffdgnp.exe"),
        ("lone \ud800 surrogate", "lone \ufffd surrogate"),
        ("\x1b\x1b[m[2J", "\ufffd[2J"),
        # An unterminated string sequence must not swallow, and so hide, the rest of the line.
        ("a\x1b]0;rest of the line", "a\ufffd]0;rest of the line"),
        ("日本語 é 🚀", "日本語 é 🚀"),
        ("warn \u26a0\ufe0f sign", "warn \u26a0 sign"),
    ],
)
def test_known_cases(raw: str, want: str) -> None:
    assert clean(raw) == want


def test_a_very_long_line_is_cut_and_says_how_much() -> None:
    out = clean("x" * 90_000)
    assert len(out) <= LIMIT
    assert out.endswith(" chars)")
    kept = out.index(" …(+")
    assert int(out[kept + 4 : -7].replace(" ", "")) == 90_000 - kept


@pytest.mark.parametrize(
    "hostile", ["\x1b[" + "0" * 100_000, "\x1b]" * 50_000, "\x1b[0;" * 30_000, "\u202e" * 200_000]
)
def test_hostile_lines_take_no_time(hostile: str) -> None:
    began = time.process_time()
    clean(hostile)
    assert time.process_time() - began < 0.5


def test_nested_values_are_cleaned_in_depth_and_keys_too() -> None:
    dirty = {"a\x1b[2J": ["x\x07", {"y": "\x9b2Jz", "n": 1, "none": None, "ok": True, "f": 1.5}]}
    assert clean_value(dirty) == {"a": ["x\ufffd", {"y": "z", "n": 1, "none": None, "ok": True, "f": 1.5}]}
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]
    assert "None" in str(clean_value(deep))


def test_every_format_character_is_covered() -> None:
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert clean(f"a{chr(code)}b").isprintable(), hex(code)
