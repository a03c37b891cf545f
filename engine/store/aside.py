"""quarantine/: the rows that were set aside, each with its cause, its evidence and the refused states."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from engine.store.files import write_atomic
from engine.wire.events import json_safe, now_iso

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_ENTRY = re.compile(r"[0-9]{8}\.json")


def rows_aside(store: Path) -> set[int]:
    """The rows that have an entry. Any other name, a write that was cut off included, is no entry."""
    folder = store / "quarantine"
    if not folder.is_dir():
        return set()
    return {int(p.stem) for p in folder.iterdir() if _ENTRY.fullmatch(p.name)}


def write_aside(
    store: Path, row: int, entry: Mapping[str, Any], tensors: Mapping[str, Tensor] | None
) -> None:
    """Write a row's entry, its tensors first. The entry is valid JSON whatever the evidence holds."""
    from safetensors.torch import save

    folder = store / "quarantine"
    folder.mkdir(exist_ok=True, mode=0o700)
    if tensors:
        whole = {k: t.contiguous() for k, t in tensors.items()}
        write_atomic(folder / f"{row:08d}.safetensors", save(whole))
    data = json_safe({"row": row, **entry, "at": now_iso()})
    text = json.dumps(data, indent=1, default=str, allow_nan=False)
    write_atomic(folder / f"{row:08d}.json", text.encode() + b"\n")


def remove_aside(store: Path, row: int) -> None:
    """Forget that a row was set aside."""
    for suffix in (".json", ".safetensors"):
        (store / "quarantine" / f"{row:08d}{suffix}").unlink(missing_ok=True)
