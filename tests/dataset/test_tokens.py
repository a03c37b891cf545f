"""Token ids and loss mask by the model's own chat template (the real tokenizer of SmolLM2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.dataset.rows import parse_row
from engine.dataset.samples import Samples
from engine.dataset.tokens import Tokens
from engine.demo.dataset import CONVERSATIONS, PROMPTS, assemble, raw_rows
from engine.wire.errors import DatasetError
from tests.models import smollm2_tokenizer


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(str(smollm2_tokenizer()))


def supervised(tokens: Tokens, data: object) -> list[str]:
    s = tokens.sample(parse_row(data, 0, Path("d")))
    parts: list[list[int]] = []
    on = False
    for t, m in zip(s.input_ids, s.loss_mask, strict=True):
        if m and not on:
            parts.append([])
        if m:
            parts[-1].append(t)
        on = bool(m)
    return [tokens.tokenizer.decode(p) for p in parts]


def test_only_the_assistants_words_and_its_end_of_turn_are_supervised(tokens: Tokens) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "See you.\n")]
    messages = [{"role": r, "content": c} for r, c in turns]
    assert supervised(tokens, {"messages": messages}) == ["Hello!<|im_end|>", "See you.\n<|im_end|>"]


def test_a_conversation_without_assistant_has_an_empty_mask(tokens: Tokens) -> None:
    assert supervised(tokens, {"messages": [{"role": "user", "content": "Hi"}]}) == []


def test_raw_ids_are_taken_as_they_are(tokens: Tokens) -> None:
    s = tokens.sample(parse_row({"input_ids": [5, 6, 7]}, 3, Path("d")))
    assert (s.row, s.input_ids, s.loss_mask) == (3, (5, 6, 7), (1, 1, 1))


def test_an_id_beyond_the_vocabulary_is_refused(tokens: Tokens) -> None:
    with pytest.raises(DatasetError, match="vocabulary has"):
        tokens.sample(parse_row({"input_ids": [5, 99_999_999]}, 0, Path("d")))


def test_a_template_that_rewrites_earlier_turns_is_refused(tokens: Tokens) -> None:
    row = parse_row({"prompt": "a", "completion": "b"}, 0, Path("d"))
    kept = tokens.tokenizer.chat_template
    tokens.tokenizer.chat_template = "{{ messages | length }}" + kept
    try:
        with pytest.raises(DatasetError, match="does not extend its own prefix"):
            tokens.sample(row)
    finally:
        tokens.tokenizer.chat_template = kept


def test_a_template_that_raises_is_a_clear_error(tokens: Tokens) -> None:
    kept = tokens.tokenizer.chat_template
    tokens.tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    try:
        with pytest.raises(DatasetError, match=r"row 17.*no tools here"):
            tokens.sample(parse_row({"prompt": "a", "completion": "b"}, 17, Path("d")))
    finally:
        tokens.tokenizer.chat_template = kept


def test_the_shipped_dataset(tokens: Tokens, tmp_path: Path) -> None:
    """Ten prompts, at least 60 conversations of 20 to 1,500 tokens, raw rows, two identical."""
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len(prompts) == 10
    answered = tmp_path / "answered.jsonl"
    answered.write_text("".join(json.dumps({"id": p["id"], "input_ids": [1, 2]}) + "\n" for p in prompts))
    out = tmp_path / "d.jsonl"
    total = assemble(answered, out)
    assert total == 10 + len(CONVERSATIONS.read_text().splitlines()) + len(raw_rows())
    assert len(CONVERSATIONS.read_text().splitlines()) >= 60
    samples = Samples(str(out), tokens)
    counted = samples.count()
    chats = [s for s in samples if not str(s.id).startswith("raw-") and len(s.input_ids) > 2]
    lengths = sorted(len(s.input_ids) for s in chats)
    assert 20 <= lengths[0] <= 40
    assert 1300 <= lengths[-1] <= 1500
    assert all(n > 0 for n in counted.supervised.values())
    ids = [s.input_ids for s in chats]
    assert len(ids) - len(set(ids)) == 1
    assert {1, 2, 63, 64, 65} <= {len(s.input_ids) for s in samples if str(s.id).startswith("raw-")}
    first = [s.id for s in samples if s.row < 40]
    assert any(str(i).startswith("raw-") for i in first)
    assert any(i in {p["id"] for p in prompts} for i in first)


def test_rows_out_of_range(tokens: Tokens, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [1]}\n')
    with pytest.raises(DatasetError, match="has 1 rows"):
        Samples(str(path), tokens, (0, 2))
    assert [s.row for s in Samples(str(path), tokens, (0, 1))] == [0]
