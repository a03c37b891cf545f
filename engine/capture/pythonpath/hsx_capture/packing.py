"""Tensors as the parts of a safetensors file: header and views of the tensors' own memory, nothing copied.

safetensors.torch.save copies everything into one bytes object and holds the interpreter meanwhile: a tenth
of a second for a large dump, in which no other thread of a server runs. Part by part, the system writes it.

Format: 8 bytes little-endian length of the header; the header, JSON with dtype, shape and data_offsets of
each tensor, padded with spaces to a multiple of 8; the data without gaps (safetensors' README, "Format").
Loaded inside production servers: torch late, relative imports only.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The parts of the file, in order. CPU tensors of the dtypes above; ValueError for another."""
    import torch

    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts: list[bytes | memoryview] = []
    at = 0
    # The widest first, so that each begins at a multiple of its own size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        dtype = DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, which a dump cannot hold")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
        if size:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            parts.append(flat.numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *parts]
