"""``plugin-<pid>.json``: the sign that the capture is active in a process; and what dead processes left
behind.

A server does not list its plugins, so this file and a canary are the only proof (docs/formats.md).
Loaded inside production servers: standard library only, relative imports only.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .dumpfile import FORMAT_VERSION, MAX_JSON_BYTES, temporary_name
from .privatedir import NotPrivate, open_private_dir, read_member, remove_member, write_member

if TYPE_CHECKING:
    from collections.abc import Mapping

_BEACON = re.compile(r"plugin-(\d{1,10})\.json\Z")
_TEMPORARY = re.compile(r"\.tmp-(\d{1,10})-[0-9a-f]+\Z")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none. Tells a reused pid
    apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])  # killed, and not yet buried by its parent


def write_beacon(folder: Path, facts: Mapping[str, Any]) -> None:
    """Say that the capture is active in this process. Raises OSError and NotPrivate."""
    pid = os.getpid()
    data = {"format_version": FORMAT_VERSION, "pid": pid, "start_ticks": start_ticks(pid), **facts}
    fd = open_private_dir(folder, create=True)
    try:
        write_member(fd, f"plugin-{pid}.json", temporary_name(), json.dumps(data).encode() + b"\n")
    finally:
        os.close(fd)


def remove_beacon(folder: Path) -> None:
    """Take this process's sign away. Raises OSError."""
    fd = open_private_dir(folder)
    try:
        remove_member(fd, f"plugin-{os.getpid()}.json")
    finally:
        os.close(fd)


def read_beacons(folder: Path) -> list[dict[str, Any]]:
    """The signs of processes that are alive, by pid. Unreadable ones are not listed; raises OSError for the
    folder."""
    fd = open_private_dir(folder)
    try:
        found = [_read(fd, name) for name in sorted(os.listdir(fd)) if _BEACON.match(name)]
    finally:
        os.close(fd)
    return [b for b in found if b is not None and _is_alive(b)]


def _read(fd: int, name: str) -> dict[str, Any] | None:
    try:
        data = json.loads(read_member(fd, name, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("pid"), int) else None


def _is_alive(beacon: Mapping[str, Any]) -> bool:
    ticks = start_ticks(beacon["pid"])
    return ticks is not None and ticks == beacon.get("start_ticks")


def remove_leftovers(folder: Path) -> list[str]:
    """Remove half-written files and signs of processes that are gone; dumps are kept. Returns the names
    removed.

    Raises OSError and NotPrivate.
    """
    fd = open_private_dir(folder, create=True)
    removed = []
    try:
        for name in sorted(os.listdir(fd)):
            temporary, sign = _TEMPORARY.match(name), _BEACON.match(name)
            if temporary:
                gone = start_ticks(int(temporary[1])) is None
            elif sign:
                beacon = _read(fd, name)
                gone = beacon is None or not _is_alive(beacon)
            else:
                continue
            if gone and remove_member(fd, name):
                removed.append(name)
    finally:
        os.close(fd)
    return removed


__all__ = ["NotPrivate", "read_beacons", "remove_beacon", "remove_leftovers", "start_ticks", "write_beacon"]
