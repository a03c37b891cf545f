"""Our own writing of safetensors, read by the library; and buffers that are given back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from engine.capture.pythonpath.hsx_capture.hostcopy import BufferPool
from engine.capture.pythonpath.hsx_capture.packing import DTYPES, pack


def packed(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(bytes(part) for part in pack(tensors, metadata or {}))


def test_the_library_reads_every_dtype_and_shape() -> None:
    values = torch.arange(-6, 6)
    tensors = {name.rpartition(".")[2]: values.to(getattr(torch, name.rpartition(".")[2])) for name in DTYPES}
    tensors |= {
        "matrix": torch.randn(3, 5), "turned": torch.randn(4, 3).T, "part": torch.randn(9, 4)[2:5],
        "empty": torch.empty(0, 7), "scalar": torch.tensor(2.5),
    }  # fmt: skip
    read = load(packed(tensors))
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_it_is_what_the_library_writes_but_for_the_order() -> None:
    tensors = {"input_ids": torch.arange(5), "aux": torch.randn(5, 6).bfloat16()}
    metadata = {"rid": "x", "error": 'a "quoted" line\nand \u00e9'}
    ours, theirs = packed(tensors, metadata), save(tensors, metadata=metadata)
    assert len(ours) % 8 == len(theirs) % 8 == (5 * 8 + 5 * 6 * 2) % 8
    assert {k: v.tolist() for k, v in load(ours).items()} == {k: v.tolist() for k, v in load(theirs).items()}


def test_a_dtype_that_cannot_be_held_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        pack({"a": torch.zeros(2, dtype=torch.complex64)}, {})


class Copy:
    """An event of a copy that goes on until it is said to be over."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def test_a_buffer_is_given_out_again_only_when_its_copy_is_over() -> None:
    pool, copy = BufferPool(pinned=False), Copy()
    first = pool.acquire(5000)
    pool.release(first, copy)
    assert pool.acquire(5000) is not first
    copy.over = True
    assert pool.acquire(5000) is first


def test_no_more_is_kept_than_the_bound() -> None:
    pool = BufferPool(pinned=False, most_bytes=8192)
    buffers = [pool.acquire(4096) for _ in range(4)]
    for buffer in buffers:
        pool.release(buffer)
    again = [pool.acquire(4096) for _ in range(4)]
    assert sum(any(b is old for old in buffers) for b in again) == 2
