"""The linear-attention kernels, where SGLang looks for them."""

from .gated_delta import *  # noqa: F403
