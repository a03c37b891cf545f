"""The Host panel: GPUs where there are any, load, memory, /dev/shm and disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_tui.model.status import Status, Tone
from hsx_tui.widgets.bars import bar
from hsx_tui.widgets.numbers import UNKNOWN, duration, size
from hsx_tui.widgets.rows import MUTED, Part, Row, cells, labelled, status_parts
from hsx_tui.widgets.view import Drawn, Frame, age_row, panel_freshness, stale_rows

if TYPE_CHECKING:
    from hsx_tui.model.state import ConsoleState, Disk, Gpu, HostState

COMPACT = 4
"""A panel with fewer rows than this shows several facts on one row."""
FULL_FROM, TIGHT_FROM = 0.95, 0.85
GRID_CELL = 28
BUSY_FROM = 5.0
"""A GPU that is used for less than this (per cent) is called idle."""


def host_view(state: ConsoleState, f: Frame) -> Drawn:
    """Draw the machine."""
    host = state.host
    fresh = panel_freshness(host.seen_at, f)
    name = host.hostname
    title: Row = [("Host", "bold"), (f"  {name}" if name else "", MUTED)]
    if host.seen_at is None:
        return Drawn(title, age_row(fresh, f.g), _nothing_yet(state, f))
    cause = stale_rows(state, fresh, host.at_iso, f) if fresh.stale else None
    room = f.height - len(cause or [])
    rows = _compact(host, f) if room < COMPACT else _full(host, f, room, fresh.stale)
    return Drawn(title, age_row(fresh, f.g), rows[:room], fresh.stale, cause)


def _nothing_yet(state: ConsoleState, f: Frame) -> list[Row]:
    cause = state.connection.cause
    rows: list[Row] = [[("no facts yet; they come with the first connection", MUTED)]]
    return [*rows, [(cause, "$error")]] if cause else rows


def _full(host: HostState, f: Frame, room: int, stale: bool) -> list[Row]:
    rows: list[Row] = [
        labelled("load", _load(host), (f"   up {duration(host.uptime_s)}", MUTED), width=_label(f)),
        _memory(host, f),
        *([_disk(host.shm, f)] if host.shm is not None else []),
        *(_disk(d, f) for d in host.disks),
    ]
    gpus = [_gpu(g, f, stale) for g in host.gpus]
    left = max(1, room - len(rows))
    if len(gpus) > left:
        gpus = _gpu_grid(host.gpus, f, left, stale)
    return gpus + rows


def _gpu_grid(gpus: tuple[Gpu, ...], f: Frame, height: int, stale: bool) -> list[Row]:
    """Several GPUs on a row; those that still have no room are counted."""
    columns = max(1, f.width // GRID_CELL)
    room = columns * height
    shown = gpus if len(gpus) <= room else gpus[: columns * (height - 1)]
    rows: list[Row] = []
    for i, gpu in enumerate(shown):
        if i % columns == 0:
            rows.append([])
        used = "?" if gpu.mem_used_mib is None else f"{gpu.mem_used_mib / 1024:.0f}"
        total = "?" if gpu.mem_total_mib is None else f"{gpu.mem_total_mib / 1024:.0f}"
        util = None if gpu.util is None else gpu.util / 100
        cell: Row = [(f"{gpu.index:<2}", MUTED), (f"{_percent(util)} {used:>3}/{total:<3} ", "")]
        cell += status_parts(_gpu_status(gpu, stale), f.g)
        rows[-1] += [*cell, (" " * max(0, GRID_CELL - cells(cell)), "")]
    if len(shown) < len(gpus):
        rows.append([(f"+{len(gpus) - len(shown)} more GPUs", MUTED)])
    return rows


def _gpu_status(gpu: Gpu, stale: bool) -> Status:
    if stale or gpu.util is None:
        return Status(Tone.UNKNOWN, "UNKNOWN")
    return Status(Tone.OK, "BUSY") if gpu.util >= BUSY_FROM else Status(Tone.IDLE, "IDLE")


def _compact(host: HostState, f: Frame) -> list[Row]:
    busy = [g for g in host.gpus if (g.util or 0) >= BUSY_FROM]
    first: Row = [("load ", MUTED), _load(host)]
    if host.gpus:
        first = [(f"GPUs {len(busy)}/{len(host.gpus)} busy", ""), ("   ", ""), *first]
    used = _used(host.mem_total, host.mem_available)
    first += [("   ram ", MUTED), (_percent(used), _tone(used)), (f" of {size(host.mem_total)}", "")]
    first += [("   up ", MUTED), (duration(host.uptime_s), "")]
    second: Row = []
    for disk in (*((host.shm,) if host.shm else ()), *host.disks):
        used = _used(disk.total, disk.free)
        second += [("   " if second else "", ""), (f"{disk.path} ", MUTED)]
        free = disk.error or f"{size(disk.free)} free"
        second += [(f"{_percent(used)} ", _tone(used)), (free, "")]
    return [first, second]


def _load(host: HostState) -> Part:
    loads = " ".join(f"{n:.2f}" for n in host.load) or UNKNOWN
    return (f"{loads} / {host.cpus if host.cpus is not None else '?'} cores", "")


def _memory(host: HostState, f: Frame) -> Row:
    return _gauge("ram", host.mem_total, host.mem_available, f)


def _disk(disk: Disk, f: Frame) -> Row:
    if disk.error:
        return labelled(disk.path, (f"{f.g.symbol_bad} {disk.error}", "$error"), width=_label(f))
    return _gauge(disk.path, disk.total, disk.free, f)


def _gauge(label: str, total: float | None, free: float | None, f: Frame) -> Row:
    used = _used(total, free)
    if len(label) >= _label(f):
        label = f.g.cut + label[-(_label(f) - 2) :]
    numbers = f" {_percent(used)}  {size(free)} free of {size(total)}"
    room = max(4, min(20, f.width - _label(f) - len(numbers)))
    return labelled(label, *bar(used, room, f.g, _tone(used) or "$primary"), (numbers, ""), width=_label(f))


def _label(f: Frame) -> int:
    return 10 if f.width < 70 else 20


def _used(total: float | None, free: float | None) -> float | None:
    if total is None or free is None or total <= 0:
        return None
    return max(0.0, min(1.0, 1 - free / total))


def _percent(fraction: float | None) -> str:
    return "  ?%" if fraction is None else f"{fraction:4.0%}"


def _tone(fraction: float | None) -> str:
    if fraction is None or fraction < TIGHT_FROM:
        return ""
    return "bold $error" if fraction >= FULL_FROM else "$warning"


def _gpu(gpu: Gpu, f: Frame, stale: bool) -> Row:
    used, total = gpu.mem_used_mib, gpu.mem_total_mib
    memory = f"{used / 1024:5.1f}" if used is not None else "    ?"
    memory += f"/{total / 1024:.0f} GiB" if total is not None else "/? GiB"
    watts = f"{gpu.power_w:4.0f} W" if gpu.power_w is not None else "   ? W"
    heat = f"{gpu.temp_c:3.0f} {f.g.degree}" if gpu.temp_c is not None else f"  ? {f.g.degree}"
    util = None if gpu.util is None else gpu.util / 100
    numbers = f" {_percent(util)}  {memory}  {watts} {heat}  "
    return [
        (f"{gpu.index:<2} ", MUTED),
        *bar(util, 10, f.g),
        (numbers, ""),
        *status_parts(_gpu_status(gpu, stale), f.g),
    ]
