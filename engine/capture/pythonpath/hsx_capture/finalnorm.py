"""The model's final norm, computed again on the writer thread: norm(pre) must be the last state.

Loaded inside production servers: torch late, relative imports only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FinalNorm:
    """RMSNorm by weight, epsilon and flavour, as SGLang's own module has them.

    The weight is copied to the host once. ``why_not``: why pre-norm states cannot be checked, so are not
    given.
    """

    def __init__(self) -> None:
        self._module: Any = None
        self._weight: torch.Tensor | None = None
        self.why_not = "the final norm has not been seen yet"

    def see(self, module: Any) -> None:
        """The module that the server uses (the first call counts)."""
        if self._module is not None:
            return
        self._module = module
        name = type(module).__name__
        if name not in ("RMSNorm", "GemmaRMSNorm") or getattr(module, "variance_size_override", None):
            self.why_not = f"the final norm is a {name}, whose result cannot be checked"
        else:
            self.why_not = ""

    def __call__(self, pre: torch.Tensor) -> torch.Tensor:
        """[S, H] -> [S, H], in pre's dtype. RMSNorm: x / sqrt(mean(x^2) + eps) * w; Gemma's has 1 + w."""
        import torch

        if self._weight is None:
            weight = self._module.weight.detach().float().cpu()
            self._weight = weight + 1.0 if type(self._module).__name__ == "GemmaRMSNorm" else weight
        x = pre.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + float(self._module.variance_epsilon))
        return (x * scale * self._weight).to(pre.dtype)
