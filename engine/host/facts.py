"""What a host is doing: load, memory, disks, GPUs, the inference server, runs. Read-only, each part with a
deadline."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from engine.host import args as arg
from engine.host.rundir import RunDir, run_status
from engine.host.server import server_facts
from engine.host.tail import left
from engine.wire.errors import SpecError
from engine.wire.events import now_iso
from engine.wire.procid import boot_id

if TYPE_CHECKING:
    from collections.abc import Mapping

NVIDIA_SMI_S = 4.0
KILLED_S = 1.0
_stuck: list[subprocess.Popen[bytes]] = []
"""Killed, but not gone yet: they are reaped later."""
_GPU_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu"


def _memory() -> dict[str, int]:
    """Bytes of memory: total and available."""
    kib = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        kib[name] = int(rest.split()[0])
    return {"total": kib["MemTotal"] << 10, "available": kib["MemAvailable"] << 10}


def disk(path: str) -> dict[str, Any]:
    """The file system that ``path`` is on, or would be."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return {"path": path, "total": None, "free": None, "error": error.strerror or str(error)}
    return {"path": path, "total": usage.total, "free": usage.free, "error": None}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # nvidia-smi prints [N/A]


def parse_nvidia_smi(output: str) -> list[dict[str, Any]]:
    """One GPU a line, the fields of _GPU_FIELDS by comma; a line of another shape is left out."""
    gpus = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 7 or not cells[0].isdigit():
            continue
        util, used, total, power, temp = map(_number, cells[2:])
        gpus.append(
            {
                "index": int(cells[0]),
                "name": cells[1],
                "util": util,
                "mem_used_mib": used,
                "mem_total_mib": total,
                "power_w": power,
                "temp_c": temp,
            }
        )
    return gpus


def _gpus() -> list[dict[str, Any]]:
    """The GPUs; none if nvidia-smi is missing, fails or hangs (as it does when a driver is stuck)."""
    _stuck[:] = [process for process in _stuck if process.poll() is None]
    program = shutil.which("nvidia-smi")
    if program is None or _stuck:
        return []  # one that is stuck is enough
    try:
        process = subprocess.Popen(
            [program, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return []
    output = _output(process)
    return [] if output is None else parse_nvidia_smi(output.decode("utf-8", "replace"))


def _output(process: subprocess.Popen[bytes]) -> bytes | None:
    """What it prints; None if it fails or takes too long.

    A process that hangs inside a driver does not even die of SIGKILL, so its end is not awaited for long.
    """
    try:
        output, _ = process.communicate(timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        try:
            process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            _stuck.append(process)
        return None
    return output if process.returncode == 0 else None


def host_facts(url: object, paths: list[str], runs: list[str]) -> dict[str, Any]:
    """HostFacts as engine.wire.verbs describes them. Raises SpecError for a bad url or run id."""
    if url is not None and not isinstance(url, str):
        raise SpecError(f"bad url {url!r}")
    shm = disk("/dev/shm")
    return {
        "at": now_iso(),
        "hostname": socket.gethostname(),
        "uptime_s": float(Path("/proc/uptime").read_text().split()[0]),
        "boot_id": boot_id(),
        "load": list(os.getloadavg()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "disks": [disk(path) for path in paths],
        "shm": {"total": shm["total"], "free": shm["free"]},
        "gpus": _gpus(),
        "server": server_facts(url) if url else None,
        "runs": [run_status(RunDir.of(run)) for run in runs],
    }


def serve_observe(args: Mapping[str, Any], stdin: int, out: BinaryIO) -> None:
    """A line of HostFacts each ``interval_s`` seconds until the console has left."""
    interval = max(0.1, arg.seconds(args.get("interval_s"), "interval_s"))
    paths, runs = arg.texts(args, "paths"), arg.texts(args, "runs")
    while True:
        began = time.monotonic()
        out.write(json.dumps(host_facts(args.get("url"), paths, runs)).encode() + b"\n")
        out.flush()
        if left(stdin, max(0.02, interval - (time.monotonic() - began))):
            return
