"""The models that tests share, made once a machine: SmolLM2 from its package, and a tiny random one."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import platformdirs

from engine.demo.convert import ensure_smollm2, ensure_smollm2_tokenizer
from engine.demo.tiny import make_tiny

CACHE = Path(platformdirs.user_cache_dir("hsx-console")) / "models"

TINY_TAPS = (1, 3, 4)


@functools.cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted (half a minute the first time)."""
    return ensure_smollm2(CACHE)


@functools.cache
def smollm2_tokenizer() -> Path:
    """Its tokenizer alone."""
    return ensure_smollm2_tokenizer(CACHE)


def tiny_with_tokenizer(folder: Path) -> Path:
    """A tiny random Llama that has SmolLM2's tokenizer and chat template."""
    return make_tiny(folder, tokenizer_from=smollm2_tokenizer())


def offline() -> None:
    """No test looks for anything on a model hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"


offline()
