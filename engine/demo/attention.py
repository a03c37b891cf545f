"""Attention over a flattened batch: the rows of several requests lie side by side in one forward, and each
request attends to its own K/V buffer only. No padding; a mask only where a chunk follows computed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from engine.demo.requests import Request

NAME = "hsx_segmented"


@dataclass(frozen=True, eq=False)
class Segment:
    """The rows of one request in one forward.

    Attributes:
        first: its first row in the packed batch.
        start: tokens of the request that were computed before (the position of its first row).
        mask: bool [rows, start + rows], or None where causality needs none.
    """

    request: Request
    first: int
    rows: int
    start: int
    prefill: bool
    mask: torch.Tensor | None

    @property
    def packed(self) -> slice:
        """Its rows in the packed batch."""
        return slice(self.first, self.first + self.rows)

    @property
    def end(self) -> int:
        """Tokens of the request that are computed after this forward."""
        return self.start + self.rows


def segment(request: Request, first: int, rows: int) -> Segment:
    """The next ``rows`` rows of a request, from row ``first`` of the packed batch."""
    start = request.computed
    mask = None
    if start > 0 and rows > 1:
        mask = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
    return Segment(request, first, rows, start, request.in_prefill, mask)


def segmented_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    segments: list[Segment],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] of the packed batch -> [1, T, Hq, D]."""
    out = torch.empty_like(query)
    for s in segments:
        assert s.request.kv is not None
        kv = s.request.kv[module.layer_idx]
        kv[0, :, s.start : s.end] = key[0, :, s.packed]
        kv[1, :, s.start : s.end] = value[0, :, s.packed]
        out[:, :, s.packed] = F.scaled_dot_product_attention(
            query[:, :, s.packed],
            kv[None, 0, :, : s.end],
            kv[None, 1, :, : s.end],
            attn_mask=s.mask,
            is_causal=s.start == 0 and s.rows > 1,
            scale=scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, segmented_attention)
