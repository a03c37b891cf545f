"""`hsx-console run list|show|start|abort|resume`: the runs on the hosts, and what may be done to them.

abort and resume say their plan and do nothing without --yes. In read-only nothing is done at all.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, Any

from engine.wire.errors import ExitCode, HsxError, Refused, UsageError
from engine.wire.verbs import LIVE
from hsx_tui.commands.hosts import Fleet
from hsx_tui.commands.launch import extract_launch
from hsx_tui.commands.output import json_object, line, table, talk
from hsx_tui.commands.status import briefs, outcome_of, run_brief
from hsx_tui.commands.watch import known_status
from hsx_tui.model.driver import Plan
from hsx_tui.services.runs import is_complete

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    from hsx_tui.services.runs import Status


async def run(args: argparse.Namespace) -> ExitCode:
    """The verb by its name."""
    verbs: dict[str, Callable[[argparse.Namespace], Awaitable[ExitCode]]] = {
        "list": list_runs,
        "show": show,
        "start": start,
        "abort": abort,
        "resume": resume,
    }
    if args.what != "list" and args.run is None:
        raise UsageError(f"hsx-console run {args.what}", "it needs the name of a run", "see run list")
    if args.what == "list" and args.run is not None:
        raise UsageError(f"hsx-console run list {args.run}", "it lists all runs", f"use run show {args.run}")
    return await verbs[args.what](args)


async def list_runs(args: argparse.Namespace) -> ExitCode:
    """Every run of the configuration and of its hosts. 3 when a host cannot be reached."""
    fleet = Fleet.of(args)
    answers = await asyncio.gather(*(_runs_of(fleet, name) for name in fleet.names))
    found: list[dict[str, Any]] = []
    for name, (its_runs, _) in zip(fleet.names, answers, strict=True):
        found += [{"host": name, "configured": b["run"] in fleet.config.runs, **b} for b in its_runs]
    seen = {(entry["host"], entry["run"]) for entry in found}
    lost = {n: e.to_json() for n, (_, e) in zip(fleet.names, answers, strict=True) if e is not None}
    for name in fleet.config.runs:
        server = fleet.config.server_of(name)
        host = fleet.config.servers[server].host if server is not None else None
        if (host, name) not in seen and (fleet.only is None or fleet.only == host):
            state = "unknown" if host is None or host in lost else "never-started"
            found.append({"host": host, "configured": True, **run_brief({"run": name, "state": state})})
    if args.json:
        json_object({"runs": found, "unreachable": lost})
    else:
        rows = [(r["run"], r["host"], r["kind"], r["state"], r["attempt"], outcome_of(r)) for r in found]
        table(("run", "host", "kind", "state", "attempt", "outcome"), rows)
        for name, (_, error) in zip(fleet.names, answers, strict=True):
            if error is not None:
                talk(f"host {name}: {error}")
    return ExitCode.CONNECTION if lost else ExitCode.OK


async def _runs_of(fleet: Fleet, host: str) -> tuple[list[dict[str, Any]], HsxError | None]:
    try:
        async with fleet.runs(host) as runs:
            return briefs(await runs.all()), None
    except HsxError as error:
        return [], error


async def show(args: argparse.Namespace) -> ExitCode:
    """All that is known of one run."""
    fleet = Fleet.of(args)
    host = fleet.host_of(args.run)
    async with fleet.runs(host) as runs:
        status = await known_status(fleet, runs, host, args.run)
    table = fleet.config.runs.get(args.run)
    if args.json:
        configured = table.model_dump(mode="json") if table is not None else None
        json_object({"run": args.run, "host": host, "configured": configured, "status": status})
        return ExitCode.OK
    brief = run_brief(status)
    line(f"{args.run} on {host}: {brief['state']} {outcome_of(brief)}".rstrip())
    for key in ("kind", "attempt", "pid", "started_at", "heartbeat_age_s", "output"):
        if brief[key] is not None:
            line(f"  {key} {brief[key]}")
    for key, value in (brief["result"] or {}).items():
        if not isinstance(value, dict):
            line(f"  {key} {value}")
    return ExitCode.OK


async def start(args: argparse.Namespace) -> ExitCode:
    """Begin a run of the configuration; one that lives already is left as it is."""
    fleet = Fleet.of(args)
    host, launch = extract_launch(fleet, args.run)
    fleet.check_may_act(host, f"run {args.run} was not started on {host}")
    async with fleet.runs(host) as runs:
        status = await runs.status(args.run)
        if status["state"] in LIVE or is_complete(status):
            return _nothing_to_do(args, host, status)
        if status["state"] != "never-started":
            raise Refused(
                f"run {args.run} was started before and is {status['state']}",
                f"attempt {status['attempt']} did not complete it",
                f"go on with {_command(args, 'resume')}",
            )
        status = await runs.launch(launch, int(status.get("attempt") or 0) + 1)
    return _done(args, host, status, f"started on {host}, attempt {status['attempt']}")


async def resume(args: argparse.Namespace) -> ExitCode:
    """Begin the next attempt of a run that has ended before all was done."""
    fleet = Fleet.of(args)
    host, launch = extract_launch(fleet, args.run)
    fleet.check_may_act(host, f"run {args.run} was not resumed on {host}")
    async with fleet.runs(host) as runs:
        status = await known_status(fleet, runs, host, args.run)
        if status["state"] in LIVE or is_complete(status):
            return _nothing_to_do(args, host, status)
        _confirm(args, _plan(args, host, status))
        status = await runs.launch(launch, int(status.get("attempt") or 0) + 1)
    return _done(args, host, status, f"resumed on {host}, attempt {status['attempt']}")


async def abort(args: argparse.Namespace) -> ExitCode:
    """Ask a run for its graceful stop; it may take minutes, ``watch`` sees its end."""
    fleet = Fleet.of(args)
    host = fleet.host_of(args.run)
    fleet.check_may_act(host, f"run {args.run} was not aborted on {host}")
    async with fleet.runs(host) as runs:
        status = await known_status(fleet, runs, host, args.run)
        if status["state"] not in LIVE:
            return _nothing_to_do(args, host, status)
        _confirm(args, _plan(args, host, status))
        status = await runs.abort(args.run)
    return _done(
        args, host, status, f"asked to stop on {host}; see its end with hsx-console watch {args.run}"
    )


_STEPS = {
    "abort": ("the engine finishes what is in flight", "it writes the open shard", "it ends"),
    "resume": ("preflight and canary", "take the rows that are not done", "check and store each of them"),
}
_UNDO = {
    "abort": "resume it: it goes on with the rows that are not done",
    "resume": "abort it: what is done by then is kept",
}


def _command(args: argparse.Namespace, what: str) -> str:
    """The command that does ``what``, with the options that were given: it can be pasted."""
    given = "".join(
        f" {name} {shlex.quote(str(value))}"
        for name, value in (("--config", args.config), ("--host", args.host))
        if value is not None
    )
    return f"hsx-console run {what} {args.run}{given} --yes"


def _plan(args: argparse.Namespace, host: str, status: Status) -> Plan:
    facts = (
        ("Run", f"{args.run}  attempt {status.get('attempt')}  {status['state']}"),
        ("Process", f"pid {status.get('pid') or '-'}"),
        ("Store", str(status.get("output") or "-")),
    )
    command = _command(args, args.what)
    title = f"{args.what.upper()} THE RUN"
    return Plan(title, host, facts, _STEPS[args.what], _UNDO[args.what], command, args.what.capitalize())


def _confirm(args: argparse.Namespace, plan: Plan) -> None:
    """Say the plan; Refused without --yes."""
    talk(f"{plan.title} on {plan.host}")
    for name, value in plan.facts:
        talk(f"  {name:8} {value}")
    for number, step in enumerate(plan.steps, 1):
        talk(f"  {number}. {step}")
    talk(f"  undo     {plan.undo}")
    if args.yes:
        return
    if args.json:
        shown = {"title": plan.title, "facts": dict(plan.facts), "steps": plan.steps, "undo": plan.undo}
        json_object({"run": args.run, "host": plan.host, "action": args.what, "acted": False, "plan": shown})
    raise Refused(f"run {args.run} was left as it is", "this was not confirmed", f"confirm: {plan.command}")


def _nothing_to_do(args: argparse.Namespace, host: str, status: Status) -> ExitCode:
    brief = run_brief(status)
    why = f"nothing to do: it is {brief['state']} {outcome_of(brief)}".rstrip()
    return _done(args, host, status, why, acted=False)


def _done(args: argparse.Namespace, host: str, status: Status, said: str, *, acted: bool = True) -> ExitCode:
    if args.json:
        json_object(
            {"run": args.run, "host": host, "action": args.what, "acted": acted, "status": run_brief(status)}
        )
    talk(f"run {args.run}: {said}")
    return ExitCode.OK
