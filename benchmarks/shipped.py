"""The shipped dataset for the measurements: every row with its kind, the ten prompts with greedy answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.corruptions import SHARED, Shipped
from engine.dataset.rows import RowFile
from engine.dataset.tokens import Tokens
from engine.demo.dataset import CONVERSATIONS, PROMPTS, interleave, raw_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT = 128
"""A chat of at most so many tokens is a short one."""
ANSWER = 64

_KINDS = {
    SHARED: "shared-1 shared-2 shared-3 shared-4 shared-5",
    "twins": "twin-a twin-b",
    "code": "reverse-list binary-search-review sql json regex git bash rust unit-test html go yaml csv latex "
    "weather-json",
    "unicode": "russian japanese emoji poem-de french arabic chinese spanish-multi symbols diacritics korean "
    "greek hindi",
    "numbers, repeats": "fractions table numbers repeat ocr dates",
}
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def shipped(model: str) -> list[Shipped]:
    """All rows in the order of the assembled dataset."""
    tokens = Tokens(model)
    prompts = RowFile(PROMPTS)
    asked = [prompts.read(i) for i in range(len(prompts))]
    answered = greedy(model, [tokens.prompt(r.messages) for r in asked])
    names = zip(asked, answered, strict=True)
    kinds = [[{"s": Shipped("greedy answers", str(r.id), tuple(ids))} for r, ids in names]]
    file = RowFile(CONVERSATIONS)
    talks = [tokens.sample(file.read(i)) for i in range(len(file))]
    kinds.append([{"s": _of(str(s.id), s.input_ids)} for s in talks])
    kinds.append([{"s": Shipped("raw ids", r["id"], tuple(r["input_ids"]))} for r in raw_rows()])
    missing = set(_BY_NAME) - {str(s.id) for s in talks}
    assert not missing, f"not in the shipped conversations: {missing}"
    return [row["s"] for row in interleave(kinds)]


def _of(name: str, ids: tuple[int, ...]) -> Shipped:
    chat = "chat, short" if len(ids) <= SHORT else "chat, long"
    return Shipped(_BY_NAME.get(name, chat), name, ids)


def greedy(model: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each prompt with the model's own answer of up to 64 tokens behind it, by transformers' generate."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    end, longest = int(loaded.config.eos_token_id), max(map(len, prompts))
    batch = torch.tensor([[end] * (longest - len(p)) + list(p) for p in prompts])
    seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = loaded.generate(
            batch, attention_mask=seen, max_new_tokens=ANSWER, do_sample=False, pad_token_id=end
        )
    answers = [row[longest:] for row in out.tolist()]
    cut = [a[: a.index(end) + 1] if end in a else a for a in answers]
    return [list(p) + a for p, a in zip(prompts, cut, strict=True)]
