"""`hsx-console status` and `deploy`: is every host there, what does it have, what runs on it.

Asking a host puts the engine into the cache folder of its user when it is not there yet: the engine is what
answers. Nothing else is changed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from engine.wire.errors import ExitCode, HsxError
from hsx_tui.commands.hosts import Fleet
from hsx_tui.commands.output import json_object, line, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from hsx_tui.services.runs import Runs

AT_ONCE = 8
"""Hosts that are asked at the same time."""

_BRIEF = ("at", "hostname", "uptime_s", "load", "cpus", "memory", "disks", "shm", "gpus")
_RUN = ("run", "kind", "attempt", "state", "pid", "started_at", "heartbeat_age_s", "output")
_RESULT = ("outcome", "dataset", "done", "quarantined", "pending", "tokens", "tok_per_s")


def run_brief(status: Mapping[str, Any]) -> dict[str, Any]:
    """A RunStatus without what only its own page needs; ``result``: null, or how it ended."""
    result, ended = status.get("result"), status.get("exit")
    brief = {key: status.get(key) for key in _RUN}
    brief["result"] = (
        {k: result[k] for k in (*_RESULT, "error") if k in result} if isinstance(result, dict) else None
    )
    brief["exit"] = {k: ended.get(k) for k in ("rc", "signal", "error")} if isinstance(ended, dict) else None
    return brief


def briefs(answer: list[Any]) -> list[dict[str, Any]]:
    """The runs of a host's answer; what is no RunStatus in it is left out."""
    found = (status for status in answer if isinstance(status, dict) and isinstance(status.get("run"), str))
    return [run_brief(status) for status in found]


async def status(args: argparse.Namespace) -> ExitCode:
    """Every host at once. 0 when all can be reached, 3 when one cannot."""
    fleet = Fleet.of(args)
    gate = asyncio.Semaphore(AT_ONCE)
    hosts = await asyncio.gather(*(_host(fleet, name, gate) for name in fleet.names))
    if args.json:
        json_object({"config": str(fleet.configured.path), "hosts": hosts})
    else:
        for host in hosts:
            _show(host)
    return ExitCode.OK if all(host["reachable"] for host in hosts) else ExitCode.CONNECTION


async def _host(fleet: Fleet, name: str, gate: asyncio.Semaphore) -> dict[str, Any]:
    """What is known of one host; ``cause`` says why nothing is."""
    table = fleet.host(name)
    found: dict[str, Any] = {
        "host": name,
        "address": f"{table.address}:{table.port}",
        "production": table.production,
        "read_only": fleet.read_only or (not fleet.read_write and fleet.config.read_only(name) is not None),
        "reachable": False,
        "cause": None,
        "facts": None,
        "servers": [],
        "runs": [],
    }
    try:
        async with gate, fleet.runs(name) as runs:
            found.update(await _ask(fleet, name, runs))
    except HsxError as error:
        return {**found, "cause": error.to_json()}
    return {**found, "reachable": True}


async def _ask(fleet: Fleet, name: str, runs: Runs) -> dict[str, Any]:
    workdir = fleet.host(name).workdir
    paths = [workdir] if workdir is not None else []
    urls = {key: server.url for key, server in fleet.config.servers.items() if server.host == name}
    facts = _object((await runs.call("probe", url=None, paths=paths)).get("facts"))
    servers = []
    for key, url in urls.items():
        seen = _object(_object((await runs.call("probe", url=url, paths=[])).get("facts")).get("server"))
        model = _object(seen.get("info")).get("model_path")
        servers.append(
            {
                "server": key,
                "url": url,
                "ready": seen.get("ready") is True,
                "error": seen.get("error"),
                "model": model,
            }
        )
    return {
        "facts": {key: facts.get(key) for key in _BRIEF},
        "servers": servers,
        "runs": briefs(await runs.all()),
    }


def _object(value: object) -> dict[str, Any]:
    """A JSON object from a host, empty where it is none."""
    return value if isinstance(value, dict) else {}


def _show(host: Mapping[str, Any]) -> None:
    """A host for people."""
    tags = [tag for tag in ("production", "read_only") if host[tag]]
    tagged = f"  [{', '.join(tags)}]" if tags else ""
    if not host["reachable"]:
        cause = host["cause"]
        line(f"{host['host']}  {host['address']}  NOT REACHABLE{tagged}")
        line(f"  {HsxError(cause['what'], cause['why'], cause['next'])}")
        return
    facts = host["facts"]
    load = facts["load"][0] if isinstance(facts["load"], list) and facts["load"] else None
    gpus = len(facts["gpus"]) if isinstance(facts["gpus"], list) else 0
    line(f"{host['host']}  {host['address']}  reachable{tagged}")
    line(f"  {facts['hostname']}  cpus {facts['cpus']}  load {load}  gpus {gpus}")
    for server in host["servers"]:
        state = "ready" if server["ready"] else f"not ready ({server['error']})"
        line(f"  server {server['server']}  {server['url']}  {state}  {server['model'] or ''}".rstrip())
    if host["runs"]:
        table(("  run", "kind", "state", "attempt", "outcome"), map(_row, host["runs"]))


def _row(run: Mapping[str, Any]) -> tuple[object, ...]:
    return f"  {run['run']}", run["kind"], run["state"], run["attempt"], outcome_of(run)


def outcome_of(run: Mapping[str, Any]) -> str:
    """How a run (brief) ended, in a word or a sentence; "" while it goes on."""
    result, ended = _object(run.get("result")), _object(run.get("exit"))
    if isinstance(result.get("error"), dict):
        return f"failed: {result['error'].get('what')}"
    if result.get("outcome"):
        counts = f" done {result.get('done')} of {result.get('dataset')}" if "done" in result else ""
        return f"{result['outcome']}{counts}"
    if ended.get("signal"):
        return f"killed by signal {ended['signal']}"
    return f"exit status {ended['rc']}" if ended.get("rc") is not None else ""


async def deploy(args: argparse.Namespace) -> ExitCode:
    """Install the engine on a host, or verify every byte of it."""
    fleet = Fleet.of(args)
    async with fleet.runs(args.name) as runs:
        engine = (await runs.link.session()).engine
    assert engine is not None  # Link.session installs it
    if args.json:
        fields = ("id", "dir", "state", "python")
        json_object({"host": args.name, "engine": {k: getattr(engine, k) for k in fields}})
    else:
        line(f"{args.name}: engine {engine.id[:12]} {engine.state} in {engine.dir}")
        line(f"{args.name}: runs with {engine.python}")
    return ExitCode.OK
