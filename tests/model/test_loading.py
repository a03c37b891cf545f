"""Loading phases from a real server's log."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hsx_tui.model.loading import Loading, read_line
from hsx_tui.text import clean

LOG = (Path(__file__).parent.parent / "data" / "server_loading.log").read_bytes().decode().split("\n")


def read(lines: list[str], now: float = 100.0, loading: Loading | None = None) -> Loading:
    loading = loading or Loading()
    for line in lines:
        loading = read_line(loading, clean(line), now)
    return loading


def upto(part: str) -> list[str]:
    index = next(i for i, line in enumerate(LOG) if part in line)
    return LOG[: index + 1]


def states(loading: Loading) -> dict[str, str]:
    return {p.name: p.state for p in loading.phases}


def test_the_whole_log_ends_every_phase() -> None:
    loading = read(LOG)
    assert loading.fired
    assert not loading.failed
    assert set(states(loading).values()) == {"done"}
    assert [p.name for p in loading.phases] == ["start", "init", "weights", "kv cache", "http", "warm-up"]
    # server_args at 20:27:32, fired up at 20:28:56
    assert loading.total(999.0) == 84.0
    took = {p.name: loading.elapsed(p, 999.0) for p in loading.phases}
    assert took == {"start": 75.0, "init": 5.0, "weights": 0.0, "kv cache": 1.0, "http": 1.0, "warm-up": 2.0}


def test_weights_show_their_share_of_the_last_redraw() -> None:
    loading = read(upto("Multi-thread loading shards"))
    assert states(loading)["weights"] == "running"
    assert next(p for p in loading.phases if p.name == "weights").fraction == 1.0
    half = read(["Multi-thread loading shards:  50% Completed | 1/2 [00:01<00:01, 1.0s/it]"])
    assert half.current == 2
    assert half.fraction == (2 + 0.5) / 6


def test_time_goes_on_between_lines() -> None:
    loading = read(upto("Load weight begin"), now=100.0)
    weights = loading.phases[loading.current or 0]
    assert weights.name == "weights"
    assert loading.elapsed(weights, 107.5) == 7.5


def test_nothing_goes_backwards() -> None:
    loading = read(LOG[:40])
    again = read(["[2026-11-30 20:28:52] Load weight begin. avail mem=21.09 GB"], loading=loading)
    assert states(again) == states(loading)


def test_converting_is_a_phase_of_its_own_where_it_happens() -> None:
    loading = read(["[2026-11-30 12:00:00] Converting SmolLM2-135M-Instruct from gguf"])
    assert loading.phases[0].name == "convert"
    assert states(loading)["convert"] == "running"
    loading = read(["[2026-11-30 12:00:41] server_args={'model_path': 'x'}"], loading=loading)
    assert states(loading)["convert"] == "done"
    assert loading.elapsed(loading.phases[0], 0.0) == 41.0


def test_graphs_appear_on_a_gpu() -> None:
    loading = read(
        [*upto("KV Cache is allocated"), "[2026-11-30 20:28:54] Capture target prefill CUDA graph begin."]
    )
    assert states(loading)["graphs"] == "running"
    assert states(loading)["kv cache"] == "done"


def test_a_failure_is_told_and_the_next_start_begins_anew() -> None:
    failed = read([*upto("Load weight begin"), "[2026-11-30 20:28:53] Scheduler hit an exception: Traceback"])
    assert failed.failed.startswith("Scheduler hit an exception")
    again = read(["[2026-11-30 20:40:00] server_args={'model_path': 'x'}"], loading=failed)
    assert not again.failed
    assert states(again) == {**{p.name: "pending" for p in again.phases}, "start": "running"}


def test_a_restart_into_the_same_log_begins_anew() -> None:
    loading = read(["[2026-11-30 20:40:00] server_args={'model_path': 'x'}"], loading=read(LOG))
    assert not loading.fired
    assert loading.current == 0


@given(st.lists(st.one_of(st.text(max_size=80), st.sampled_from(LOG)), max_size=30), st.floats(0, 1e9))
def test_no_log_breaks_it(lines: list[str], now: float) -> None:
    loading = read(lines, now=now)
    assert 0.0 <= loading.fraction <= 1.0
    for phase in loading.phases:
        elapsed = loading.elapsed(phase, now)
        assert elapsed is None or elapsed >= 0
