"""The samples of a run: some rows of a dataset file, encoded when asked for, counted once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.dataset.rows import RowFile
from engine.wire.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.dataset.tokens import Sample, Tokens


@dataclass(frozen=True)
class Counted:
    """What a pass over the rows found: lengths in tokens, supervised tokens, by row."""

    n_tokens: dict[int, int]
    supervised: dict[int, int]

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return sum(self.n_tokens.values())

    @property
    def longest(self) -> tuple[int, int]:
        """(row, tokens) of the longest row."""
        row = max(self.n_tokens, key=lambda r: (self.n_tokens[r], -r))
        return row, self.n_tokens[row]


class Samples:
    """Rows [first, last) of a dataset file under a model's tokenizer."""

    def __init__(self, path: str, tokens: Tokens, rows: tuple[int, int] | None = None) -> None:
        self.file = RowFile(Path(path))
        self.tokens = tokens
        first, last = rows or (0, len(self.file))
        if last > len(self.file):
            raise DatasetError(
                f"rows {first}:{last} were asked for",
                f"the dataset {path} has {len(self.file)} rows",
                f"ask for at most {len(self.file)} rows",
            )
        self.rows = range(first, last)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(row) for row in self.rows)

    def sample(self, row: int) -> Sample:
        """The sample of a dataset row."""
        return self.tokens.sample(self.file.read(row))

    def count(self) -> Counted:
        """One pass over all rows (the ids are not kept)."""
        n_tokens, supervised = {}, {}
        for s in self:
            n_tokens[s.row] = len(s.input_ids)
            supervised[s.row] = sum(s.loss_mask)
        return Counted(n_tokens, supervised)
