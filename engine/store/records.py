"""A sample as it is stored, its hash, and its line in index.jsonl."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.wire.errors import StoreError
from engine.wire.events import now_iso

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

HASHED = ("input_ids", "loss_mask", "taps", "last")
"""The tensors under a sample's sha256, in this order, where present (formats.md)."""


@dataclass(frozen=True)
class Record:
    """A checked sample.

    Attributes:
        tensors: input_ids int64 [S], loss_mask uint8 [S], taps [S, K, H] in the store's dtype, last [S, H]
        if taken;
            all contiguous, on the CPU.
        stats: per tap, {"mean", "std", "absmax"}.
        evidence: {"kind", "value", ...}.
    """

    row: int
    rid: str
    attempts: int
    tensors: Mapping[str, Tensor]
    stats: Mapping[str, Mapping[str, float]]
    evidence: Mapping[str, Any]
    sha256: str = ""

    @property
    def n_tokens(self) -> int:
        """S."""
        return int(self.tensors["input_ids"].numel())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class IndexLine:
    """One line of index.jsonl: the sample is done."""

    row: int
    rid: str
    n_tokens: int
    shard: str
    sha256: str
    attempts: int
    at: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The line, newline included."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), allow_nan=False).encode() + b"\n"


_REQUIRED: dict[str, type] = {
    "row": int,
    "rid": str,
    "n_tokens": int,
    "shard": str,
    "sha256": str,
    "attempts": int,
    "at": str,
}


def parse_index_line(data: object) -> IndexLine:
    """Check one parsed line; unknown keys are ignored. StoreError."""
    if not isinstance(data, dict):
        raise StoreError("an index line is not an object")
    for key, kind in _REQUIRED.items():
        if not isinstance(data.get(key), kind):
            raise StoreError(f"an index line has no valid {key}")
    return IndexLine(
        **{k: data[k] for k in _REQUIRED}, stats=data.get("stats") or {}, evidence=data.get("evidence") or {}
    )


def index_line(record: Record, shard: str) -> IndexLine:
    """The line that makes ``record`` done."""
    return IndexLine(
        record.row,
        record.rid,
        record.n_tokens,
        shard,
        record.sha256 or tensors_sha256(record.tensors),
        record.attempts,
        now_iso(),
        record.stats,
        record.evidence,
    )


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, little endian, without a copy (contiguous, on the CPU)."""
    import torch

    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat).cast("B")


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the raw bytes of the HASHED tensors."""
    digest = hashlib.sha256()
    for name in HASHED:
        if name in tensors:
            digest.update(raw_bytes(tensors[name]))
    return digest.hexdigest()
