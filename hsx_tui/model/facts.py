"""HostFacts (engine/wire/verbs.py) into the state of the host and of the server. Never raises on odd
facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hsx_tui.model.fields import count, items, mapping, number, text
from hsx_tui.model.state import Disk, Gpu, HostState, ServerState

MAX_GPUS = 64
MAX_DISKS = 16


def host_state(facts: Mapping[str, Any], now: float) -> HostState:
    """The machine as ``facts`` tell it; what is missing there is None or empty."""
    memory = mapping(facts.get("memory"))
    shm = facts.get("shm")
    return HostState(
        seen_at=now,
        at_iso=text(facts.get("at"), 40),
        hostname=text(facts.get("hostname"), 80),
        uptime_s=number(facts.get("uptime_s")),
        load=tuple(n for n in map(number, items(facts.get("load"), 3)) if n is not None),
        cpus=count(facts.get("cpus")),
        mem_total=number(memory.get("total")),
        mem_available=number(memory.get("available")),
        shm=_disk({"path": "/dev/shm", **shm}) if isinstance(shm, Mapping) else None,
        disks=tuple(_disk(d) for d in items(facts.get("disks"), MAX_DISKS) if isinstance(d, Mapping)),
        gpus=tuple(
            _gpu(i, g) for i, g in enumerate(items(facts.get("gpus"), MAX_GPUS)) if isinstance(g, Mapping)
        ),
    )


def _disk(data: Mapping[str, Any]) -> Disk:
    return Disk(
        path=text(data.get("path"), 200),
        total=number(data.get("total")),
        free=number(data.get("free")),
        error=text(data.get("error")),
    )


def _gpu(place: int, data: Mapping[str, Any]) -> Gpu:
    index = count(data.get("index"))
    return Gpu(
        index=place if index is None else index,
        name=text(data.get("name"), 60),
        util=number(data.get("util")),
        mem_used_mib=number(data.get("mem_used_mib")),
        mem_total_mib=number(data.get("mem_total_mib")),
        power_w=number(data.get("power_w")),
        temp_c=number(data.get("temp_c")),
    )


def server_state(before: ServerState, facts: Mapping[str, Any], now: float) -> ServerState:
    """The server as ``facts`` tell it. Facts without one leave what its log has told."""
    server = facts.get("server")
    if not isinstance(server, Mapping):
        return replace(before, configured=False, ready=False) if before.configured else before
    info = mapping(server.get("info"))
    loads = _first_load(server.get("loads"))
    ready = server.get("ready") is True
    return replace(
        before,
        seen_at=now,
        at_iso=text(facts.get("at"), 40),
        configured=True,
        url=text(server.get("url"), 120),
        ready=ready,
        error=text(server.get("error")),
        model=text(info.get("served_model_name") or info.get("model_path"), 200) or before.model,
        version=text(info.get("version"), 40) or before.version,
        running=count(loads.get("num_running_reqs")),
        waiting=count(loads.get("num_waiting_reqs")),
        token_usage=number(loads.get("token_usage")),
        throughput=number(loads.get("gen_throughput")),
    )


def _first_load(loads: Any) -> Mapping[str, Any]:
    """/v1/loads answers with one entry per data-parallel rank, in a list or under "loads"."""
    if isinstance(loads, Mapping) and isinstance(loads.get("loads"), list):
        loads = loads["loads"]
    if isinstance(loads, list):
        return mapping(loads[0]) if loads else {}
    return mapping(loads)
