"""`hsx-console watch RUN`: the events of a run from its host's file, until the run has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.wire.errors import ExitCode, Refused, from_json
from hsx_tui.commands.hosts import Fleet
from hsx_tui.commands.output import json_line, line, talk
from hsx_tui.commands.status import outcome_of, run_brief
from hsx_tui.model.messages import Connection, Link, Message
from hsx_tui.services.events import run_events

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from hsx_tui.services.runs import Runs, Status


async def known_status(fleet: Fleet, runs: Runs, host: str, run: str) -> Status:
    """RunStatus of a run that was started. Raises UsageError (unknown), Refused (never started)."""
    status = await runs.status(run)
    if status["state"] != "never-started":
        return status
    if run in fleet.config.runs:
        raise Refused(
            f"run {run} was never started on {host}", "", f"start it with hsx-console run start {run}"
        )
    known = {str(found.get("run")) for found in await runs.all()}
    raise fleet.unknown_run(run, known | set(fleet.config.runs))


async def watch(args: argparse.Namespace) -> ExitCode:
    """Every event after --after. 0 when the run ended complete, 1 when it did not, or not with every row."""
    fleet = Fleet.of(args)
    host = fleet.host_of(args.run)
    async with fleet.runs(host) as runs:
        await known_status(fleet, runs, host, args.run)
        last = 0
        async for event in run_events(runs.link, args.run, _say):
            seq = event["seq"]
            if last and seq != last + 1:
                talk(
                    f"WARNING events {last + 1} to {seq - 1} are missing"
                    if seq > last
                    else "events begin anew"
                )
            last = seq
            if seq > args.after:
                json_line(event) if args.jsonl else line(event_text(event))
        status = await runs.status(args.run)
    talk(f"run {args.run} is {status['state']}: {outcome_of(run_brief(status)) or 'without a result'}")
    result = status.get("result")
    if isinstance(result, dict) and "error" in result and result["error"] is not None:
        talk(str(from_json(result["error"])))
    return exit_of(status)


def exit_of(status: Mapping[str, Any]) -> ExitCode:
    """0 for an ended run that did all it was to do, else 1."""
    result, ended = status.get("result"), status.get("exit")
    if isinstance(result, dict) and "outcome" in result:
        clean_end = result["outcome"] == "complete" and not result.get("quarantined")
        return ExitCode.OK if clean_end else ExitCode.FINDING
    good = isinstance(ended, dict) and ended.get("rc") == 0
    return ExitCode.OK if good else ExitCode.FINDING


def _say(message: Message) -> None:
    """The state of the link, for people."""
    if isinstance(message, Connection):
        if message.state is Link.LOST:
            talk(f"link lost: {message.cause}; trying again in {message.retry_in_s or 0:.1f} s")
        else:
            talk(f"link {message.state}")


def event_text(event: Mapping[str, Any]) -> str:
    """One event as a line."""
    kind = event["type"]
    head = f"{event['at']} {event['seq']:>6}"
    if kind == "progress":
        eta = event.get("eta_s")
        left = "?" if not isinstance(eta, int | float) else f"{eta / 60:.0f} min"
        counts = ", ".join(f"{key} {event.get(key)}" for key in ("done", "quarantined", "pending"))
        pace = f"{event.get('samples_per_s')} samples/s, {event.get('tok_per_s')} tok/s"
        return f"{head} {counts}, {pace}, ETA {left}"
    if kind == "mismatch":
        return (
            f"{head} WARNING sample {event.get('row')}: {event.get('cause')}, got {event.get('got')},"
            f" expected {event.get('expected')} ({event.get('outcome')})"
        )
    if kind == "phase":
        return f"{head} {event.get('name')}: {event.get('detail') or ''}".rstrip(": ")
    if kind in ("warning", "paused"):
        return f"{head} WARNING {event.get('text') or event.get('reason') or kind}"
    rest = {
        k: v for k, v in event.items() if k not in ("seq", "at", "type") and not isinstance(v, dict | list)
    }
    return f"{head} {kind} {' '.join(f'{k}={v}' for k, v in rest.items())}".rstrip()
