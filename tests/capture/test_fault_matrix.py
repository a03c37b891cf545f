"""Every kind of fault, injected into real dumps and replies between the server and the collector: all refused
under the right cause, and no right sample refused (fault_runs.py)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from engine.wire.causes import Cause
from tests.capture.fault_runs import FAULTS, MASKS, run_matrix
from tests.capture.fault_table import DOCUMENT, terminal
from tests.capture.faults import PEERS
from tests.demo.harness import start_server, stop_server
from tests.models import tiny_with_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.tiny
@pytest.mark.timeout(1500)
def test_every_fault_is_refused_by_name_and_no_right_sample_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_with_tokenizer(tmp_path / "model")
    (tmp_path / "server").mkdir()
    server = start_server(model, tmp_path / "server", "--chunked-prefill-size", "64")
    try:
        results = run_matrix(tmp_path, model, server)
    finally:
        stop_server(server.process)
    with capsys.disabled():
        print("", *terminal(results), sep="\n")  # noqa: T201 (the table is what one wants to see)
    assert results.wrong() == []
    assert results.good.names == {}
    assert results.win_rate_good.names == {}
    assert results.cases >= 2000
    assert results.good.cases >= 500
    assert results.http_cases >= 300
    assert results.verified >= 500
    assert results.canary == "canary: 3 of 3 samples are wrong"


def test_all_causes_and_all_of_the_peers_rows_are_in_the_matrix() -> None:
    assert set().union(*(f.causes for f in FAULTS)) == set(Cause)
    assert {f.peers for f in FAULTS} - {""} == set(PEERS)
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    assert all(f.causes or f in MASKS for f in FAULTS)
    assert all(f.why for f in FAULTS if len(f.causes) > 1)


def test_the_document_has_the_faults_of_the_code() -> None:
    """``python -m benchmarks.fault_matrix`` makes it again."""
    text = DOCUMENT.read_text()
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:2] == "| "
    ]
    named = {row[0]: row for row in table[1:]}
    assert list(named) == [f.name for f in FAULTS]
    for fault in FAULTS:
        _, peers, refused, names, *_ = named[fault.name]
        assert peers == (fault.peers or "–")
        assert {re.sub(r" \d+$", "", n) for n in names.split(", ")} <= (
            {c.value for c in fault.causes} or {fault.refusal}
        ), fault.name
        count, cases = map(int, refused.split("/"))
        assert count == cases > 0
    total = re.search(r"^(\d+) randomised cases", text, re.MULTILINE)
    assert total is not None
    assert int(total[1]) >= 2000
