"""What is known of the host's servers: process, loading, readiness, capture, jobs. Nothing is changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from engine.host.files import read_json
from engine.host.processes import ServerProcess, find_servers
from engine.host.rundir import RunDir, run_status
from engine.host.server import server_facts
from engine.host.servers import journal
from engine.host.servers.beacons import live_beacons
from engine.host.servers.description import INFO_KEYS, ORIGINAL, SAVED, describe, read_description
from engine.host.servers.loads import usual
from engine.host.servers.ours import refusal
from engine.host.servers.plan import plan_json
from engine.host.servers.ports import server_at
from engine.host.servers.target import Target, target_from
from engine.host.servers.wanted import order_from
from engine.host.servers.watching import MOST_BYTES, LogWatch
from engine.wire.errors import SpecError
from engine.wire.verbs import LIVE

if TYPE_CHECKING:
    from collections.abc import Mapping


def _loading(target: Target, server: ServerProcess) -> dict[str, Any] | None:
    """The phases by the log of the server's run, or the configured one; None where no log is known."""
    run = RunDir.of(target.run)
    status = run_status(run)
    own = status["state"] in LIVE and status["pid"] in (server.id.pid, *server.parents)
    log = run.path / "stdio.log" if own else (Path(target.log) if target.log else None)
    if log is None:
        return None
    try:
        size = log.stat().st_size
    except OSError:
        return None
    watch = LogWatch(log, max(0, size - MOST_BYTES))
    seen = watch.look()
    current = seen.current
    return {
        "phase": seen.phases[current].name if current is not None else None,
        "fraction": round(seen.fraction, 3),
        "phases": [{"name": p.name, "state": p.state} for p in seen.phases],
        "fired": seen.fired,
        "death": watch.death,
        "log": str(log),
    }


def server_state(target: Target) -> dict[str, Any]:
    """Everything about one server, in plain JSON types."""
    server, facts = server_at(target.port), server_facts(target.url)
    refused = refusal(server, target.unit) if server is not None else None
    info = facts["info"] or {}
    original = read_description(target.folder / ORIGINAL)
    saved = read_description(target.folder / SAVED)
    loading = _loading(target, server) if server is not None else None
    described = describe(server, target.url) if server is not None else saved
    return {
        "server": target.name,
        "url": target.url,
        "process": server.to_json() if server is not None else None,
        # A server that is dying goes on answering /ready for seconds.
        "ready": facts["ready"] and not (loading and loading["death"]),
        "error": facts["error"],
        "info": {name: info[name] for name in INFO_KEYS if name in info},
        "loads": facts["loads"],
        "ours": server is not None and refused is None,
        "why_not": refused.to_json() if refused is not None else None,
        "capture": live_beacons(target.dump_dir),
        "changed_by_us": original is not None,
        "saved_at": saved.at if saved is not None else None,
        "loading": loading,
        "death": loading["death"] if loading is not None else "",
        "uptime_s": _uptime(server),
        "usual": usual(target.folder, described) if described is not None else None,
        "job": read_json(target.folder / journal.NAME),
        "job_run": run_status(RunDir.of(target.job_run)),
    }


def _uptime(server: ServerProcess | None) -> float | None:
    if server is None or server.started_at is None:
        return None
    return max(0.0, round(time.time() - server.started_at, 1))


def servers_verb(args: Mapping[str, Any], _: BinaryIO) -> dict[str, Any]:
    """``server_status``: the configured servers, and every other one that runs here."""
    given = args.get("servers")
    if not isinstance(given, list) or len(given) > 64:
        raise SpecError("bad servers", "it is a list of at most 64 objects with name and url")
    states = [server_state(target_from(item)) for item in given]
    known = {state["process"]["pid"] for state in states if state["process"] is not None}
    others = [server.to_json() for server in find_servers() if server.id.pid not in known]
    return {"servers": states, "others": others}


def plan_verb(args: Mapping[str, Any], _: BinaryIO) -> dict[str, Any]:
    """``server_plan``: what an order would do now."""
    return {"plan": plan_json(order_from(args))}
