"""Whether a server captures: the signs that its plugin keeps in the dump folder, of live processes only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.host.files import read_json
from engine.wire.procid import start_time

MOST = 64
_MAX_BYTES = 64 << 10
_SHOWN = ("pid", "taps", "model", "version", "failed", "tp_rank", "dp_rank")


def live_beacons(dump_dir: str | None) -> list[dict[str, Any]]:
    """``plugin-<pid>.json`` of live processes, in a folder of ours; their main fields."""
    if dump_dir is None:
        return []
    folder = Path(dump_dir)
    try:
        if folder.lstat().st_uid != os.geteuid() or folder.is_symlink():
            return []
        names = sorted(p for p in folder.iterdir() if p.name.startswith("plugin-"))[:MOST]
        small = [p for p in names if not p.is_symlink() and p.lstat().st_size <= _MAX_BYTES]
    except OSError:
        return []
    found = []
    for beacon in filter(None, map(read_json, small)):
        pid = beacon.get("pid")
        if isinstance(pid, int) and pid > 0 and start_time(pid) == beacon.get("start_ticks"):
            found.append({name: beacon[name] for name in _SHOWN if name in beacon})
    return found
