"""Conversations -> token ids and loss mask, by the model's own chat template.

The loss mask marks what the assistant generates: from the end of the generation prompt to the end of its
turn, the end-of-turn token included and the template's trailing newline not. It is found by rendering the
conversation up to each assistant turn, so it needs no ``{% generation %}`` marks in the template; a
template that does not extend its own prefix is an error, never a guess.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.wire.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.dataset.rows import Row


@dataclass(frozen=True)
class Sample:
    """One token sequence with its loss mask; both have the length of the prompt."""

    row: int
    id: str | None
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


class Tokens:
    """A model's tokenizer with its chat template, and their identities."""

    def __init__(self, model: str, thinking: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"cannot load the tokenizer of {model}", str(error).splitlines()[0], "check target.model"
            ) from error
        self.thinking = thinking
        self.sha256 = _tokenizer_sha(model, self.tokenizer)
        template = self.tokenizer.chat_template
        self.template_sha256 = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
        self.vocab_size = len(self.tokenizer)

    def sample(self, row: Row) -> Sample:
        """Token ids and loss mask of a row; raises DatasetError."""
        if row.input_ids is not None:
            over = [t for t in row.input_ids if t >= self.vocab_size]
            if over:
                raise DatasetError(
                    f"row {row.row} has token id {over[0]}",
                    f"the vocabulary has {self.vocab_size} ids",
                    "the row was tokenised for another model: tokenise it again",
                )
            mask = row.loss_mask if row.loss_mask is not None else (1,) * len(row.input_ids)
            return Sample(row.row, row.id, row.input_ids, mask)
        return self._conversation(row)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation with the generation prompt behind it."""
        return self._render(messages, True, "a prompt")

    def _conversation(self, row: Row) -> Sample:
        messages = row.messages
        where = f"row {row.row}"
        ids = self._render(messages, False, where)
        mask = [0] * len(ids)
        for i, m in enumerate(messages):
            if m["role"] != "assistant":
                continue
            start = self._common(row, ids, self._render(messages[:i], True, where))
            end = self._common(row, ids, self._render(messages[: i + 1], False, where))
            while end > start and self._is_blank(ids[end - 1]):
                end -= 1
            mask[start:end] = [1] * (end - start)
        return Sample(row.row, row.id, tuple(ids), tuple(mask))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, where: str
    ) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise DatasetError(
                "the model has no chat template",
                f"{where} is a conversation",
                "give rows of input_ids instead",
            )
        try:
            out = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=True,
                add_generation_prompt=generation_prompt,
                enable_thinking=self.thinking,
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise DatasetError(
                f"{where}: the chat template refused the conversation",
                str(error) or type(error).__name__,
                "mend or remove it",
            ) from error
        return [int(t) for t in out["input_ids"]]

    def _common(self, row: Row, ids: list[int], prefix: list[int]) -> int:
        if ids[: len(prefix)] != prefix:
            raise DatasetError(
                f"row {row.row}: the chat template does not extend its own prefix",
                "the loss mask cannot be told (some templates rewrite earlier turns, such as thinking)",
                "give the row as input_ids with its loss_mask",
            )
        return len(prefix)

    def _is_blank(self, token: int) -> bool:
        return not self.tokenizer.decode([token]).strip()


def _tokenizer_sha(model: str, tokenizer: Any) -> str:
    file = Path(model) / "tokenizer.json"
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocab.encode()).hexdigest()
