"""Whether the capture is active in a server, and whether its dumps find room: the folder and its beacons."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.capture.pythonpath.hsx_capture.beacon import read_beacons
from engine.run.checklist import Check, error, info, warning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MEMORY = frozenset({"tmpfs", "ramfs"})
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "ceph", "gluster", "gpfs", "beegfs")

_START = "start the server with the capture plugin (python -m engine plugin says how)"


@dataclass(frozen=True)
class Room:
    """What the dumps of a server need and have, in bytes.

    Attributes:
        at_once: of the longest rows, as many as are in flight. longest: of the longest row alone.
        free: of the folder's file system.
    """

    at_once: int
    longest: int
    free: int


def traffic_told(folders: Sequence[Path]) -> dict[str, int]:
    """Who used the servers meanwhile, as the beacons tell it (hsx_capture/traffic.py), summed."""
    told: dict[str, int] = {}
    for beacon in [b for folder in folders for b in look(folder)[0]]:
        traffic = beacon.get("traffic")
        for name, count in traffic.items() if isinstance(traffic, dict) else ():
            if isinstance(count, int):
                most = name == "largest_batch"
                told[name] = max(told.get(name, 0), count) if most else told.get(name, 0) + count
    return told


def look(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The beacons of live processes in a dump folder; and why it cannot be used ("" when it can)."""
    try:
        return read_beacons(folder), ""
    except OSError as failed:
        return [], str(failed)


def capture_active(
    beacons: Sequence[Mapping[str, Any]], trouble: str, folder: Path, processes: int
) -> list[Check]:
    """Whether a live process of the server says that it captures.

    Args:
        trouble: why the folder cannot be used, or "".
        processes: schedulers (data-parallel ranks) of the server.
    """
    name, effect = "capture", "no request would be captured"
    if trouble:
        detail = f"the dump folder cannot be used: {trouble}"
        step = f"give the server's own dump folder (HSX_DUMP_DIR), 0700 and ours; {_START}"
        return [error(name, detail, effect, step)]
    if not beacons:
        return [error(name, f"no live process says in {folder} that it captures", effect, _START)]
    failed = [b for b in beacons if b.get("failed")]
    if failed:
        why = " ".join(str(failed[0]["failed"]).split())[:200]
        return [error(name, f"process {failed[0]['pid']} failed: {why}", effect, "restart the server")]
    said = ", ".join(sorted({str(b.get("version") or "?")[:80] for b in beacons}))
    if len(beacons) < processes:
        detail = f"{len(beacons)} of {processes} data-parallel processes capture ({said})"
        return [
            error(name, detail, "requests of the other ranks would not be captured", "see the server's log")
        ]
    found = [info(name, f"active in {len(beacons)} process(es): {said}")]
    if len(beacons) > processes:
        detail = f"{len(beacons)} processes capture into {folder}, the server has {processes}"
        doubted = "a second server seems to write there; dumps are known by request id, so none is mistaken"
        found.append(
            warning("dump folder shared", detail, doubted, "give each server a dump folder of its own")
        )
    return found


def dump_room(folder: Path, room: Room, beacons: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Whether what is in flight fits: into the file system, and into the capture's own bounds."""
    kind = file_system(folder)
    where = f"{folder} ({kind}{', memory' if kind in _MEMORY else ''})"
    detail = f"{where}: up to {_gb(room.at_once)} at once, {_gb(room.free)} free"
    step = (
        "lower the concurrency, or free /dev/shm"
        if kind in _MEMORY
        else "lower the concurrency, or free space"
    )
    if room.at_once * 2 > room.free:
        checks = [
            error("dump folder", detail, "dumps would not be written, and their rows asked for again", step)
        ]
    else:
        checks = [info("dump folder", detail)]
    if any(part in kind for part in _REMOTE):
        effect = "a dump may be seen late, or in part, and every one crosses the network"
        step = "dump into /dev/shm or a local disk"
        checks.append(warning("dump folder's file system", where, effect, step))
    for name, flag in (("folder_bytes", "HSX_FOLDER_BYTES"), ("memory_bytes", "HSX_MEMORY_BYTES")):
        bounds = [b["limits"].get(name) for b in beacons if isinstance(b.get("limits"), dict)]
        least = min((n for n in bounds if isinstance(n, int)), default=None)
        if least is None:
            continue
        told = f"{name} of the capture is {_gb(least)}"
        if room.longest > least:
            detail = f"{told}, and the longest row's dump needs {_gb(room.longest)}"
            step = f"start the server with {flag} at {room.longest * 2} or more"
            checks.append(error("capture's bounds", detail, "that row can never be captured", step))
        elif room.at_once > least:
            detail = f"{told}, and up to {_gb(room.at_once)} may be waiting at once"
            step = f"lower the concurrency, or start the server with {flag} at {room.at_once} or more"
            checks.append(
                warning("capture's bounds", detail, "rows are asked for again: slower, not wrong", step)
            )
    return checks


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` lies on, as Linux names it; "unknown" where it does not."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) < 5 or not types:
            continue
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, types[0]
    return kind


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
