"""Views: at every size, of every odd state, rows fit, nothing raises, ASCII is ASCII."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from hsx_tui.model.messages import Connection, Link, Message
from hsx_tui.model.reduce import reduce
from hsx_tui.model.state import ConsoleState
from hsx_tui.widgets.bars import bar, stacked
from hsx_tui.widgets.glyphs import ASCII, UNICODE, Glyphs
from hsx_tui.widgets.host_view import host_view
from hsx_tui.widgets.line_views import header_row, problem_rows
from hsx_tui.widgets.numbers import about, age, clock, duration, grouped, rate, size, stamp
from hsx_tui.widgets.rows import fit
from hsx_tui.widgets.run_view import run_view
from hsx_tui.widgets.server_view import server_view
from hsx_tui.widgets.view import Drawn, Frame, View
from hsx_tui.widgets.warnings_view import warnings_view
from tests.model.test_reduce import odd_messages, play
from tests.tui import scenes

VIEWS: list[View] = [host_view, server_view, run_view, warnings_view]
LOST = Connection(Link.LOST, "keepalive timeout", 8.0, attempt=3)


def text(drawn: Drawn, f: Frame) -> str:
    rows = [fit(row, f.width, f.g) for row in [drawn.title, drawn.right, *(drawn.cause or []), *drawn.rows]]
    return "\n".join("".join(t for t, _ in row) for row in rows)


def frame(width: int = 56, height: int = 8, now: float = 1029.0, g: Glyphs = UNICODE) -> Frame:
    return Frame(width, height, now, 2.0, g)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(odd_messages, max_size=8),
    st.integers(1, 130),
    st.integers(1, 12),
    st.floats(0, 1e7),
    st.booleans(),
)
def test_no_state_breaks_a_view(
    messages: list[Message], width: int, height: int, later: float, ascii_only: bool
) -> None:
    state = play(scenes.running(3, gpus=3)) if width % 2 else ConsoleState()
    for message in messages:
        state = reduce(state, message, 1010.0)
    f = frame(width, height, 1010.0 + later, ASCII if ascii_only else UNICODE)
    for view in VIEWS:
        drawn = view(state, f)
        for row in [*(drawn.cause or []), *drawn.rows]:
            fitted = fit(row, width, f.g)
            assert sum(cell_len(t) for t, _ in fitted) == width
            assert not ascii_only or all(t.isascii() for t, _ in fitted)
    header_row(state, f, "0.1.0")
    problem_rows(state, f)


@pytest.mark.parametrize("view", VIEWS)
def test_every_panel_shows_its_age(view: View) -> None:
    state = play(scenes.running(30))
    drawn = view(state, frame(now=1031.0))
    assert any("ago" in t for t, _ in drawn.right)
    assert not drawn.stale


@pytest.mark.parametrize("view", VIEWS[:3])
@pytest.mark.parametrize("width", [56, 116])
@pytest.mark.parametrize("height", [2, 3, 6, 8])
def test_a_stale_panel_says_since_when_why_and_what_next(view: View, width: int, height: int) -> None:
    state = reduce(play(scenes.running(30)), LOST, 1031.0)
    drawn = view(state, frame(width, height, 1036.0))
    assert drawn.stale
    said = "\n".join("".join(t for t, _ in row) for row in [*(drawn.cause or []), drawn.right])
    assert "STALE 7 s" in said or "STALE 8 s" in said
    assert "keepalive timeout" in said
    assert "retry 4 in 3 s (r now)" in said
    assert "values from 12:00:2" in said
    assert len(drawn.rows) + len(drawn.cause or []) <= height
    assert drawn.rows, "the last values stay"


def test_the_bar_tells_durable_from_buffered() -> None:
    state = play(scenes.running(30))
    said = text(run_view(state, frame(116, 6)), frame(116, 6))
    assert "done 24 / 80" in said
    assert "+ 5 not yet durable" in said
    assert "36.2 %" in said
    assert "█" in said and "▒" in said


def test_100_percent_is_said_only_at_the_end() -> None:
    assert "".join(t for t, _ in stacked([(0.999, "")], 10, UNICODE)) != "█" * 10
    parts = stacked([(0.95, "a"), (0.0499, "b")], 20, UNICODE)
    assert sum(len(t) for t, _ in parts) == 20


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200), st.booleans())
def test_a_bar_always_has_its_width(a: float, b: float, width: int, ascii_only: bool) -> None:
    g = ASCII if ascii_only else UNICODE
    assert sum(cell_len(t) for t, _ in stacked([(a, ""), (b, "")], width, g)) == width
    assert sum(cell_len(t) for t, _ in bar(a, width, g)) == width


@given(st.lists(st.tuples(st.text(max_size=30), st.just("")), max_size=6), st.integers(1, 60), st.booleans())
def test_fit_fits(row: list[tuple[str, str]], width: int, with_right: bool) -> None:
    from hsx_tui.text import clean

    row = [(clean(t), s) for t, s in row]
    fitted = fit(row, width, UNICODE, [("right", "")] if with_right else None)
    assert sum(cell_len(t) for t, _ in fitted) == width


def test_loading_shows_each_phase_with_its_time() -> None:
    state = play(scenes.loading())
    said = text(server_view(state, frame(56, 8, 1003.0)), frame())
    assert "LOADING 42%" in said
    assert "● start" in said and "0:03" in said
    assert "◐ weights" in said and "50%" in said
    assert "◌ warm-up" in said
    small = text(server_view(state, frame(76, 2, 1003.0)), frame(76, 2))
    assert "3/6 weights" in small and "so far" in small


def test_no_log_line_for_90_seconds_is_no_progress() -> None:
    state = play(scenes.loading())
    for second in range(0, 100, 2):
        state = reduce(state, scenes.facts(float(second), ready=False), 1000.0 + second)
    assert "NO PROGRESS" in text(server_view(state, frame(56, 8, 1098.0)), frame())


def test_a_machine_without_anything_is_drawn() -> None:
    from hsx_tui.model.messages import HostFactsSeen

    state = reduce(ConsoleState(), HostFactsSeen({}), 1000.0)
    for height in (2, 8):
        assert "?" in text(host_view(state, frame(56, height, 1000.0)), frame())


def test_gpus_that_do_not_fit_are_counted() -> None:
    state = play(scenes.running(3, gpus=24))
    said = text(host_view(state, frame(56, 8, 1003.0)), frame())
    assert "more GPUs" in said


def test_numbers() -> None:
    assert grouped(1234567, UNICODE) == "1\u2009234\u2009567"
    assert grouped(1234567, ASCII) == "1,234,567"
    assert [rate(v, ASCII) for v in (None, 0.42, 41.26, 2567.0)] == ["-", "0.42", "41.3", "2,567"]
    assert [size(v) for v in (None, 512, 3.2 * 2**30, 18.4 * 2**40)] == ["-", "512 B", "3.2 GiB", "18.4 TiB"]
    assert [duration(v) for v in (7, 728, 11_520, 12 * 86_400)] == ["0:07", "12:08", "3 h 12 m", "12 d 0 h"]
    assert [about(v) for v in (40, 720, 101_520)] == ["40 s", "12 m", "28 h 12 m"]
    assert [age(v) for v in (2, 185, 7800)] == ["2 s", "3 m 05 s", "2 h 10 m"]
    assert clock("2026-11-30T12:03:50.123Z") == "12:03:50"
    assert [stamp(v) for v in ("2026-11-30T12:03:50.1Z", "2026-11-30T12:03:50", "soon")] == [
        "12:03:50Z", "12:03:50", "--:--:--",
    ]  # fmt: skip
