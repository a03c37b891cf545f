"""A lone forward of the whole target through transformers: the yardstick of ``verify --recompute``.

It shares nothing with the capture: no hooks, no batch, no cache; the states come from
``output_hidden_states``.
hidden_states[k + 1] is the output of layer k, except the last entry, which is after the final norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class LoneForward:
    """The target in float32 on the CPU."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, trust_remote_code=False
        )
        self._model.eval()

    def states(self, input_ids: Sequence[int]) -> list[Tensor]:
        """float32 [S, H] each: embedding, output of every layer, the last one after the final norm."""
        import torch

        with torch.inference_mode():
            out = self._model.get_decoder()(
                input_ids=torch.tensor([list(input_ids)]), use_cache=False, output_hidden_states=True
            )
        return [h[0] for h in out.hidden_states]
