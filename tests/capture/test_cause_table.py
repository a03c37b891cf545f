"""The table of causes is complete, and the document is made of it."""

from __future__ import annotations

from benchmarks.causes import DOCUMENT
from engine.wire.cause_table import TABLE, markdown
from engine.wire.causes import MEANING, Cause


def test_every_cause_has_an_entry_that_says_something() -> None:
    assert list(TABLE) == list(Cause) == list(MEANING)
    for entry in TABLE.values():
        for text in (entry.meaning, entry.evidence, entry.likely, entry.confirm, entry.action):
            assert len(text) > 10, entry.cause


def test_no_two_causes_are_decided_by_the_same() -> None:
    assert len({entry.evidence for entry in TABLE.values()}) == len(Cause)


def test_the_document_is_the_tables() -> None:
    """``python -m benchmarks.causes`` makes it again."""
    assert DOCUMENT.read_text() == "".join(f"{line}\n" for line in markdown())
