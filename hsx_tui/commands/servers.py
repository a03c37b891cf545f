"""`hsx-console server status|start|stop|restart HOST`: the SGLang servers of a host.

start, stop and restart say their plan and do nothing without --yes. In read-only only status is there.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from engine.wire.errors import ExitCode, Refused, UsageError
from hsx_tui.commands.hosts import Fleet
from hsx_tui.commands.output import json_object, line, talk
from hsx_tui.config import nearest
from hsx_tui.services.servers import Order, Servers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


async def server(args: argparse.Namespace) -> ExitCode:
    """The verb by its name."""
    if (args.capture is not None or args.restore) and args.what != "restart":
        raise UsageError(f"hsx-console server {args.what}", "--capture and --restore belong to restart")
    if args.capture is not None and args.restore:
        raise UsageError("--capture and --restore", "they exclude each other", "give one")
    fleet = Fleet.of(args)
    fleet.host(args.name)
    return await (_status(args, fleet) if args.what == "status" else _act(args, fleet))


def _names(args: argparse.Namespace, fleet: Fleet) -> list[str]:
    """The configured servers of the host that are meant."""
    names = [name for name, table in fleet.config.servers.items() if table.host == args.name]
    if args.server is None:
        return names
    if args.server not in names:
        raise UsageError(
            f"unknown server {args.server!r} on {args.name}",
            f"{fleet.configured.path} does not name it",
            nearest(args.server, names),
        )
    return [args.server]


def _the_one(args: argparse.Namespace, fleet: Fleet) -> str:
    names = _names(args, fleet)
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(
            f"host {args.name} has no server", f"{fleet.configured.path} names none", "add [servers.NAME]"
        )
    raise UsageError(f"which server of {args.name}?", f"it has {', '.join(names)}", "name it with --server")


def _wire(fleet: Fleet, name: str) -> dict[str, Any]:
    """A server's table as the host takes it."""
    table = fleet.config.servers[name]
    return {
        "name": name,
        "url": table.url,
        "launch": list(table.launch) if table.launch is not None else None,
        "unit": table.unit,
        "dump_dir": table.dump_dir,
        "log": table.log,
    }


async def _status(args: argparse.Namespace, fleet: Fleet) -> ExitCode:
    """Every server of the host. 1 when one of the configured is not ready."""
    names = _names(args, fleet)
    async with fleet.runs(args.name) as runs:
        found = await Servers(runs).status([_wire(fleet, name) for name in names])
    if args.json:
        json_object({"host": args.name, **found})
    else:
        for state in found["servers"]:
            _show(state)
        for other in found["others"]:
            line(f"not configured: pid {other.get('pid')} of {other.get('user')}, port {other.get('port')}")
            line(f"  argv {shlex.join(map(str, other.get('argv') or []))}")
    ready = all(state.get("ready") for state in found["servers"])
    return ExitCode.OK if ready else ExitCode.FINDING


def _show(state: Mapping[str, Any]) -> None:
    process, loading = state.get("process"), state.get("loading") or {}
    if process is None:
        what = "does not run"
    elif loading.get("death"):
        what = f"dying: {loading['death']}"
    elif state.get("ready"):
        what = "ready"
    else:
        what = f"not ready, phase {loading.get('phase') or 'unknown'}"
    line(f"{state.get('server')} at {state.get('url')}: {what}")
    if process is not None:
        line(f"  process pid {process.get('pid')} start {process.get('start')} of {process.get('user')}")
        line(f"  model {process.get('model')}, up {state.get('uptime_s')} s")
        line(f"  argv {shlex.join(map(str, process.get('argv') or []))}")
        refused = state.get("why_not")
        line(f"  ours {'yes' if refused is None else _why(refused)}")
    usual = state.get("usual")
    if isinstance(usual, dict):
        line(f"  loads usually in {usual.get('total_s')} s (median of {usual.get('count')})")
    taps = [beacon.get("taps") for beacon in state.get("capture") or []]
    if taps:
        line(f"  captures layers {taps[0]}")
    if state.get("changed_by_us"):
        line("  stands in for an ordinary server: server restart --restore puts that back")
    job = state.get("job")
    if isinstance(job, dict) and job.get("ended") is None:
        line(f"  unfinished job: {job.get('key')}, begun {job.get('began')}; the same verb goes on with it")


def _why(refused: Mapping[str, Any]) -> str:
    return f"no: {refused.get('what')}: {refused.get('why')}"


def _order(args: argparse.Namespace, fleet: Fleet, name: str) -> Order:
    taps = None
    if args.capture is not None:
        runs = fleet.config.runs
        if args.capture not in runs:
            raise UsageError(
                f"unknown run {args.capture!r}",
                f"{fleet.configured.path} does not name it",
                nearest(args.capture, runs),
            )
        its_server, target = fleet.config.server_of(args.capture), fleet.config.target_of(args.capture)
        if its_server != name or target is None:
            raise UsageError(f"run {args.capture} does not take from server {name}", f"but from {its_server}")
        taps = fleet.config.targets[target].output_taps
    return Order(_wire(fleet, name), args.what, taps, args.restore)


async def _act(args: argparse.Namespace, fleet: Fleet) -> ExitCode:
    name = _the_one(args, fleet)
    order = _order(args, fleet, name)
    fleet.check_may_act(args.name, f"server {name} was left as it is")
    async with fleet.runs(args.name) as runs:
        servers = Servers(runs)
        plan = await servers.plan(order)
        if plan.get("noop") and not plan.get("resumes"):
            return _done(args, name, {"outcome": "already", "detail": plan["noop"]}, acted=False)
        _confirm(args, name, plan)
        result = await servers.perform(order, plan, talk)
    return _done(args, name, result, acted=True)


def _confirm(args: argparse.Namespace, name: str, plan: Mapping[str, Any]) -> None:
    """Say the plan; Refused without --yes."""
    talk(f"{args.what.upper()} SERVER {name} on {args.name}")
    process = plan.get("process")
    if isinstance(process, dict):
        talk(
            f"  process  pid {process.get('pid')} start {process.get('start')} of {process.get('user')}, "
            f"model {process.get('model')}, port {process.get('port')}"
        )
    if plan.get("resumes"):
        talk("  an unfinished job of this kind is gone on with")
    for number, step in enumerate(plan.get("steps") or [], 1):
        talk(f"  {number}. {step}")
    for change in plan.get("difference") or []:
        talk(f"  {change}")
    if args.yes:
        return
    if args.json:
        json_object({"host": args.name, "server": name, "action": args.what, "acted": False, "plan": plan})
    raise Refused(f"server {name} was left as it is", "this was not confirmed", f"confirm: {_command(args)}")


def _command(args: argparse.Namespace) -> str:
    """The command with the options that were given, confirmed: it can be pasted."""
    options = (("--config", args.config), ("--server", args.server), ("--capture", args.capture))
    given = "".join(f" {option} {shlex.quote(str(value))}" for option, value in options if value is not None)
    restore = " --restore" if args.restore else ""
    return f"hsx-console server {args.what} {args.name}{given}{restore} --yes"


def _done(args: argparse.Namespace, name: str, result: Mapping[str, Any], *, acted: bool) -> ExitCode:
    if args.json:
        head = {"host": args.name, "server": name, "action": args.what, "acted": acted}
        json_object({**head, "result": dict(result)})
    if not acted:
        talk(f"server {name}: nothing to do: {result.get('detail')}")
        return ExitCode.OK
    process = result.get("process")
    where = f", pid {process.get('pid')}" if isinstance(process, dict) else ""
    talk(f"server {name}: {args.what} {result.get('outcome')}{where}")
    for change in result.get("differs") or []:
        talk(f"  differs from what was meant: {change}")
    return ExitCode.OK
