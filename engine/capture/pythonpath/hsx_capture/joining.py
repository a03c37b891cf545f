"""A request's prefill chunks, put together by their start positions; nothing is guessed from counts.

Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .dumpfile import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from .hostcopy import HostRows


@dataclass(frozen=True)
class Piece:
    """What one forward computed of one request of ours.

    Attributes:
        serial: one number for all forwards of a request, another for every other request, also with the same
            rid.
        prompt: the token ids of the whole prompt; read later, so it must not change.
        start: how many tokens of the prompt were in the K/V cache before this forward.
        aux: [n, K*H], the taps side by side; last [n, H] after the final norm; pre [n, H] before it.
        seen: [n], the ids that the forward saw.
        batch: facts of the forward (its number, how many requests it had), kept with the chunk.
    """

    rid: str
    serial: int
    prompt: Sequence[int]
    start: int
    aux: torch.Tensor
    last: torch.Tensor | None = None
    pre: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    batch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """n."""
        return int(self.aux.shape[0])

    @property
    def end(self) -> int:
        """How many tokens of the prompt are computed after this forward."""
        return self.start + self.rows

    def slices(self) -> dict[str, torch.Tensor]:
        """What is to be copied, by name."""
        named = {"aux": self.aux, "last": self.last, "pre": self.pre, "seen": self.seen}
        return {name: t for name, t in named.items() if t is not None}


@dataclass
class Partial:
    """The chunks of a request whose prefill goes on. ``refused``: no file at all, an error file instead;
    ``busy``: because there was no room."""

    rid: str
    serial: int
    prompt: Sequence[int]
    touched: float
    chunks: list[Chunk] = field(default_factory=list)
    parts: list[HostRows] = field(default_factory=list)
    expected: int = 0
    error: str = ""
    refused: bool = False
    busy: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        return sum(p.nbytes for p in self.parts)

    def is_restart(self, piece: Piece) -> bool:
        """Whether the server took the request back and begins it again (retraction)."""
        return piece.start == 0 and bool(self.chunks)

    def note(self, piece: Piece, now: float) -> None:
        """Account for a chunk: where it starts decides whether the rows before it are all there."""
        self.touched = now
        self.chunks.append(Chunk(piece.start, piece.rows, dict(piece.batch)))
        if not self.error:
            self.error = self._gap(piece)
        self.expected = piece.end

    def _gap(self, piece: Piece) -> str:
        total = len(piece.prompt)
        if piece.start == self.expected and piece.end <= total:
            return ""
        if piece.end > total:
            return f"a chunk ends at {piece.end} but the prompt has {total} tokens"
        if len(self.chunks) == 1:
            return (
                f"prefix cache hit: the first {piece.start} of {total} rows were not computed for this "
                f"request: {piece.start} rows are missing"
            )
        if piece.start > self.expected:
            return (
                f"lost chunk: a chunk starts at {piece.start} but only {self.expected} of {total} rows had "
                f"arrived: {piece.start - self.expected} rows are missing"
            )
        return f"a chunk starts at {piece.start} a second time: {self.expected} of {total} rows had arrived"
