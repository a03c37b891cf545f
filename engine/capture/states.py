"""The hidden states of one request as a source delivers them, and what was found wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engine.wire.causes import Cause


@dataclass(frozen=True)
class States:
    """What was taken for one request.

    Attributes:
        rid: the request id that the dump itself carries.
        input_ids: int64 [S], the ids that the forward pass saw.
        aux: [S, K*H], the taps side by side, ascending.
        last: [S, H] after the final norm, or None.
        pre: [S, H] before the final norm, or None.
        num_tokens: S as the writer says it.
        layers: the captured layers as "output of 0-based layer k", as the writer says them.
        chunks: of the prefill, ``{"start", "n", ...}`` each.
        facts: anything else that the writer says (strings).
    """

    rid: str
    input_ids: Tensor
    aux: Tensor
    last: Tensor | None
    pre: Tensor | None
    num_tokens: int
    layers: tuple[int, ...]
    chunks: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Why states are not their sample's.

    ``got`` and ``expected`` are numbers or short texts of the same kind (tokens, layers, a dtype);
    ``evidence`` has
    the figures that decided.
    """

    cause: Cause
    got: Any = None
    expected: Any = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    states: States | None = None
