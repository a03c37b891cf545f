"""What an order would do now: read only, asked before anything is done, and by the job itself again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.host.servers.command import masked
from engine.host.servers.description import Description, describe, difference
from engine.host.servers.journal import unfinished
from engine.host.servers.ours import refusal, unit_of
from engine.host.servers.ports import listeners, server_at
from engine.host.servers.wanted import Order, wanted
from engine.wire.errors import HsxError, Refused
from engine.wire.verbs import LIVE

if TYPE_CHECKING:
    from engine.host.processes import ServerProcess
from engine.host.rundir import RunDir, run_status


@dataclass(frozen=True)
class Plan:
    """``noop``: why there is nothing to do, "" when there is. ``before``, ``after``: None for no server."""

    running: ServerProcess | None
    before: Description | None
    after: Description | None
    noop: str = ""
    resumes: bool = False


def plan(order: Order) -> Plan:
    """Find out what is to be done. Raises Refused."""
    target = order.target
    running, left = server_at(target.port), unfinished(target.folder)
    resumes = left is not None and left.get("key") == order.key
    if running is None:
        if listeners(target.port) and order.action != "stop":
            raise Refused(
                f"port {target.port} is in use", "what listens there is no server that we know", "stop it"
            )
        if order.action == "stop":
            return Plan(None, None, None, "it does not run", resumes)
        return Plan(None, None, wanted(order, None), "", resumes)
    if order.action == "start" and not resumes:
        return Plan(running, None, None, f"it runs already, pid {running.id.pid} of {running.user}")
    refused = refusal(running, target.unit)
    if refused is not None:
        raise refused
    _check_expected(order, running, resumes)
    before = describe(running, target.url)
    if order.action == "stop":
        return Plan(running, before, None, "", resumes)
    if unit_of(running) is not None and (order.taps is not None or order.restore):
        raise Refused(
            f"server {target.name} is started by its unit {running.unit}",
            "its argv is in the unit, which we do not edit",
            "see docs/servers.md for a drop-in that makes it capture",
        )
    return Plan(running, before, wanted(order, before), "", resumes)


def _check_expected(order: Order, running: ServerProcess, resumes: bool) -> None:
    if order.expected is None or resumes:
        return
    now = running.id.to_json()
    told = {name: order.expected.get(name) for name in now}
    if told != now:
        raise Refused(
            f"the server changed since the plan was shown: expected pid {told['pid']} start {told['start']}",
            f"found pid {now['pid']} start {now['start']}",
            "look at it again with server status",
        )


def plan_json(order: Order) -> dict[str, Any]:
    """The plan in plain JSON types; what refuses the order is in it and not raised."""
    target = order.target
    job, left = run_status(RunDir.of(target.job_run)), unfinished(target.folder)
    answer: dict[str, Any] = {
        "run": target.job_run,
        "attempt": job["attempt"],
        "live": job["state"] in LIVE,
        "live_order": left.get("key") if left is not None else None,
        "order": order.key,
        "process": None, "noop": "", "resumes": False, "difference": [], "steps": [], "refused": None,
    }  # fmt: skip
    try:
        found = plan(order)
    except HsxError as error:
        running = server_at(order.target.port)
        return {
            **answer,
            "process": running.to_json() if running is not None else None,
            "refused": error.to_json(),
        }
    before, after = found.before, found.after
    return {
        **answer,
        "process": found.running.to_json() if found.running is not None else None,
        "noop": found.noop,
        "resumes": found.resumes,
        "difference": difference(before, after) if before is not None and after is not None else [],
        "argv": masked(after.argv) if after is not None else None,
        "steps": _steps(order, found),
    }


def _steps(order: Order, found: Plan) -> list[str]:
    if found.noop:
        return []
    steps = []
    if found.running is not None:
        who = found.running.id.pid
        steps += [
            "save its argv, environment and folder",
            f"stop pid {who}: TERM, INT after {order.grace[0]:g} s, KILL after {order.grace[1]:g} s more",
            "wait until its port and its GPU memory are free",
        ]
    if found.after is not None:
        steps += [
            "start it under a supervisor",
            f"wait for /ready, up to {order.deadline_s:g} s",
            "verify it",
        ]
    return steps
