"""The fault matrix as a table next to the peers' columns, and as docs/fault-matrix.md."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tests.capture.fault_runs import FAULTS
from tests.capture.faults import FOUND_BY, PEER_COLUMNS, PEERS, RETAKE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.capture.fault_runs import Results, Seen
    from tests.capture.faults import Fault

DOCUMENT = Path(__file__).parents[2] / "docs" / "fault-matrix.md"

_INTRODUCTION = """Real dumps of the real recorder in the real small server (a tiny random model, float32,
chunks of 64) are damaged between the server and the collector, by a proxy that touches the dump's file or the
reply before it hands the reply on. The collector is the one of production: an extraction job with
one attempt a row, so that every refusal ends in quarantine with its cause, and everything else is
stored. Lengths are 1 to 120 tokens; which row gets which fault is drawn from a seed. `python -m
benchmarks.fault_matrix` makes this page again; tests/capture/test_fault_matrix.py makes the same
runs and fails when one damaged sample is taken, one right sample is refused, or a wrong cause is
named. What each cause means: [causes.md](causes.md)."""

_PEERS = """The peers' columns: A accepted silently, R rejected, U dropped with a warning, * read in their
code and not executed; SpecForge 0.2.0 (EAGLE-3 with validation, DFlash), the speculators 0.9.0 loader
and its --validate-outputs, the nvidia-modelopt 0.47.0 loader, as of September 2026. "–": not in
that comparison."""

_LIMITS = """What one sample alone does not show: a fault of one upper tap, or of `pre` and `last` alike,
with the lowest tap right. Recomputation reads the lowest tap, so such a sample would be taken:
these rows are refused by the second take (every 32nd sample by default, every one in this run),
and a fault that is there before the run by the canary (shown: "{canary}"). A fault that is the
same in both takes is seen by `verify --recompute` only. `pre` or `last` alone is seen at once
where the dump has both, since norm(pre) must be last. A tap that is less than a tenth too large
or too small, alone, is not seen by the second take either. And no row is seen whose error is
within rounding: 0.2 % of its norm where the server computes in float32, as here, 3 % in
bfloat16 ([evidence.md](evidence.md))."""


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """The cells: fault, peers' row, refused, named, found by, the peers' five."""
    for fault in FAULTS:
        seen = results.faults[fault.name]
        peers = PEERS.get(fault.peers, ("–",) * len(PEER_COLUMNS))
        yield fault.name, fault.peers or "–", f"{seen.refused}/{seen.cases}", _names(seen), _by(fault), *peers


def _names(seen: Seen) -> str:
    return ", ".join(name if len(seen.names) == 1 else f"{name} {n}" for name, n in seen.names.most_common())


def _by(fault: Fault) -> str:
    return FOUND_BY[fault.run]


def markdown(results: Results) -> Iterator[str]:
    """The lines of the document."""
    head = ("fault", "peers' row", "refused", "named", "found by", *PEER_COLUMNS)
    good, win = results.good, results.win_rate_good
    yield "# Fault matrix"
    yield ""
    yield from textwrap.wrap(_INTRODUCTION, 118)
    yield ""
    yield from textwrap.wrap(
        f"{results.cases} randomised cases, {results.http_cases} of them through HTTP; "
        f"{len(FAULTS)} kinds of fault. Right samples refused: {good.refused} of {good.cases} with "
        f"recomputation, {win.refused} of {win.cases} with the win rate. All {results.verified} samples "
        "that the main run stored equal a lone forward (`verify --recompute`).",
        118,
    )
    yield ""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows(results):
        yield f"| {' | '.join(row)} |"
    yield ""
    yield from textwrap.wrap(_PEERS, 118)
    yield ""
    yield "## Two names, or another than one would expect"
    yield ""
    for fault in FAULTS:
        if fault.why:
            named = " or ".join(sorted(c.value for c in fault.causes))
            yield f"- {fault.name}: {named}; {fault.why}."
    yield ""
    yield "## What it does not show"
    yield ""
    yield from textwrap.wrap(_LIMITS.format(canary=results.canary), 118)
    assert any(f.run == RETAKE for f in FAULTS)


def terminal(results: Results) -> Iterator[str]:
    """The same in short, in columns."""
    cells = [("fault", "peers' row", "refused", "named", "found by", *PEER_COLUMNS), *rows(results)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    good, win = results.good, results.win_rate_good
    yield f"{results.cases} cases, {results.http_cases} of them through HTTP"
    yield f"right samples refused: {good.refused}/{good.cases}, with the win rate {win.refused}/{win.cases}"
