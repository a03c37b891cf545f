"""Shards: many samples in one safetensors file, durable before any of them counts as done.

A shard's metadata carries the index lines of its samples, so that a crash between the shard's rename and the
append to index.jsonl loses nothing: the lines are taken from the shard at the next start.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.store.files import write_atomic
from engine.store.records import IndexLine, Record, index_line, parse_index_line
from engine.wire.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_NAME = re.compile(r"(\d{6,})\.safetensors\Z")


def shard_name(number: int) -> str:
    """``shards/000000.safetensors``."""
    return f"shards/{number:06d}.safetensors"


def shard_number(name: str) -> int:
    """The number in a shard's name as the index has it."""
    return int(Path(name).stem)


def shard_numbers(store: Path) -> list[int]:
    """The numbers of the shards on disk, ascending."""
    folder = store / "shards"
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.match(p.name)))


def write_shard(store: Path, number: int, records: Sequence[Record]) -> list[IndexLine]:
    """Write one shard durably; returns the index lines that may now be appended. StoreError when it
    cannot."""
    from safetensors.torch import save

    name = shard_name(number)
    lines = [index_line(r, name) for r in records]
    tensors = {f"{r.row:08d}.{key}": t for r in records for key, t in r.tensors.items()}
    metadata = {"format_version": "1", "index": "".join(line.encode().decode() for line in lines)}
    (store / "shards").mkdir(exist_ok=True, mode=0o700)
    write_atomic(store / name, save(tensors, metadata=metadata))
    return lines


def read_shard_lines(store: Path, number: int) -> list[IndexLine]:
    """The index lines in a shard's metadata; StoreError when it is damaged."""
    with open_shard(store, shard_name(number)) as f:
        metadata = f.metadata() or {}
    try:
        return [parse_index_line(json.loads(line)) for line in metadata["index"].splitlines()]
    except (KeyError, ValueError) as error:
        raise StoreError(f"shard {number:06d} carries no readable index", str(error)) from error


def open_shard(store: Path, name: str) -> Any:
    """A safetensors handle (a context manager). StoreError when it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    if not re.fullmatch(r"shards/\d{6,}\.safetensors", name):
        raise StoreError(f"bad shard name {name!r} in the index")
    try:
        return safe_open(store / name, framework="pt")
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"cannot read {name}", str(error), "run verify to see which rows are lost"
        ) from error


def sample_tensors(shard: Any, row: int) -> dict[str, Tensor]:
    """All tensors of a row in an open shard, by their short names. StoreError when there are none."""
    prefix = f"{row:08d}."
    found = {key[len(prefix) :]: shard.get_tensor(key) for key in shard.keys() if key.startswith(prefix)}  # noqa: SIM118
    if not found:
        raise StoreError(f"row {row} is not in its shard")
    return found
