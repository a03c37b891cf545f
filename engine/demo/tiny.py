"""A tiny random Llama for fast tests: the vocabulary of SmolLM2, so that its tokenizer and ids fit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LAYERS = 6
HIDDEN = 64


def make_tiny(folder: Path, seed: int = 0, tokenizer_from: Path | None = None) -> Path:
    """Write the model (6 layers, hidden 64, float32, 13 MB) into ``folder``; with the tokenizer files of
    another one.

    The weights are wide enough that a state depends on what stands before its token. Raises OSError.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    config: Any = LlamaConfig(
        vocab_size=49152, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, initializer_range=0.12,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config).to(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if tokenizer_from is not None:
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_from / name, folder / name)
    return folder
