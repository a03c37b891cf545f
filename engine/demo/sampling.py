"""From logits to the next token: greedy, or by temperature with top-k and top-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.demo.requests import Request


def sample(logits: torch.Tensor, request: Request) -> int:
    """The next token of ``request`` from logits [vocabulary]."""
    s = request.sampling
    if s.temperature <= 0:
        return int(logits.argmax())
    scores, order = (logits / s.temperature).sort(descending=True)
    if s.top_k > 0:
        scores, order = scores[: s.top_k], order[: s.top_k]
    chances = scores.softmax(-1)
    if s.top_p < 1:
        before = chances.cumsum(-1) - chances
        chances = chances.masked_fill(before >= s.top_p, 0.0)
    if request.generator is None:
        request.generator = torch.Generator()
        if s.seed is None:
            request.generator.seed()
        else:
            request.generator.manual_seed(s.seed)
    return int(order[torch.multinomial(chances, 1, generator=request.generator)])
