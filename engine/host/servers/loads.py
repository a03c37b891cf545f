"""How long a server took to load, one line a load; the usual time is the median of the earlier ones."""

from __future__ import annotations

import hashlib
import json
import statistics
from typing import TYPE_CHECKING, Any

from engine.wire.durable import append_durably
from engine.wire.events import now_iso

if TYPE_CHECKING:
    from pathlib import Path

    from engine.host.servers.description import Description
    from engine.wire.loading import Loading

NAME = "loads.jsonl"
_MAX_BYTES = 1 << 20


def fingerprint(server: Description) -> str:
    """Equal for equal model and argv; the argv itself is in no file that is shown."""
    return hashlib.sha256(json.dumps([server.model, list(server.argv)]).encode()).hexdigest()[:16]


def record(folder: Path, server: Description, loading: Loading, total_s: float) -> None:
    """Append a load that became ready. Raises OSError."""
    phases = {
        p.name: round(p.ended - p.began, 1)
        for p in loading.phases
        if p.began is not None and p.ended is not None
    }
    line = {
        "at": now_iso(),
        "model": server.model,
        "argv": fingerprint(server),
        "total_s": round(total_s, 1),
        "phases": phases,
    }
    append_durably(folder / NAME, json.dumps(line).encode() + b"\n")


def usual(folder: Path, server: Description) -> dict[str, Any] | None:
    """{"total_s", "phases", "count"}: medians over earlier loads of the same model and argv (seconds)."""
    try:
        with (folder / NAME).open("rb") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return None
    loads = [load for load in map(_load, lines) if load is not None and load["argv"] == fingerprint(server)]
    if not loads:
        return None
    names = dict.fromkeys(name for load in loads for name in load["phases"])
    medians = {n: statistics.median(ld["phases"][n] for ld in loads if n in ld["phases"]) for n in names}
    total = statistics.median(load["total_s"] for load in loads)
    return {"total_s": total, "phases": medians, "count": len(loads)}


def _load(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None  # a power failure tore it
    whole = isinstance(data, dict) and isinstance(data.get("total_s"), (int, float))
    return data if whole and isinstance(data.get("phases"), dict) and "argv" in data else None
