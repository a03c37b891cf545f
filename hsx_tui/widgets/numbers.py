"""Numbers, sizes and times as the screen writes them: short, with their unit, never a guess."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsx_tui.widgets.glyphs import Glyphs

UNKNOWN = "-"


def grouped(value: float | None, g: Glyphs, digits: int = 0) -> str:
    """12 345 or 12 345.6; thousands are set off by a thin space."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}".replace(",", g.thin)


def rate(value: float | None, g: Glyphs) -> str:
    """Three figures or so: 0.42, 1.32, 41.2, 2 567."""
    if value is None:
        return UNKNOWN
    return grouped(value, g, 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0)


def size(value: float | None) -> str:
    """Bytes as 512 B, 3.2 GiB, 18.4 TiB."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float | None) -> str:
    """0:07, 12:08, 3 h 12 m, 12 d 4 h."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def about(seconds: float) -> str:
    """A duration that is only an estimate: 40 s, 12 m, 28 h 12 m."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} m"
    return duration(seconds)


def age(seconds: float) -> str:
    """2 s, 3 m 05 s, 2 h 10 m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return duration(seconds)


def clock(iso: str) -> str:
    """HH:MM:SS of an ISO time as a host wrote it; "" if it has none."""
    time = iso[11:19] if len(iso) >= 19 and iso[10] in "T " else ""
    return time if time[2:3] == ":" and time[5:6] == ":" else ""


def stamp(iso: str) -> str:
    """HH:MM:SSZ, or HH:MM:SS where the host did not say that it is UTC; "--:--:--" without a time."""
    time = clock(iso)
    return (time + ("Z" if iso.endswith(("Z", "+00:00")) else "")) if time else "--:--:--"
