"""The SGLang servers of a host, as the console asks about them and orders jobs on them.

A job is one supervised run on the host; the console only begins it and looks on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.wire.errors import Refused, RemoteError, SpecError
from engine.wire.events import decode
from engine.wire.verbs import ENDED
from hsx_tui.deploy.tail import START, Batch, Cursor, follow
from hsx_tui.services.runs import Launch, result_of
from hsx_tui.text import clean, clean_value, host_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hsx_tui.services.runs import Runs

JOB_GRACE = (20.0, 10.0)
"""A job that is stopped leaves its journal; it needs no time."""


@dataclass(frozen=True)
class Order:
    """What to do with a server.

    Attributes:
        server: {"name", "url", "launch", "unit", "dump_dir", "log"}, as the host takes it.
        action: "start", "stop" or "restart".
        taps: of a restart as a capture server; None for any other.
        restore: a restart that puts the ordinary server back.
    """

    server: Mapping[str, Any]
    action: str
    taps: Sequence[int] | None = None
    restore: bool = False

    def to_json(self, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As it goes over the wire. ``expected``: the process that the plan showed."""
        identity = {k: expected.get(k) for k in ("pid", "start", "boot")} if expected is not None else None
        return {
            "server": dict(self.server),
            "action": self.action,
            "taps": list(self.taps) if self.taps is not None else None,
            "restore": self.restore,
            "expected": identity,
        }


class Servers:
    """The servers of one host. Everything that it returns is cleaned."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    async def status(self, servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """{"servers": [...], "others": [...]} as engine.host.servers.status has them."""
        answer = await self.runs.call("server_status", servers=[dict(s) for s in servers])
        found = {name: _objects(answer.get(name)) for name in ("servers", "others")}
        if len(found["servers"]) != len(servers):
            raise RemoteError("the host answered without its servers")
        return found

    async def plan(self, order: Order) -> dict[str, Any]:
        """What the order would do now. Raises what refuses it."""
        plan = clean_value((await self.runs.call("server_plan", **order.to_json())).get("plan"))
        if not isinstance(plan, dict) or not isinstance(plan.get("run"), str):
            raise RemoteError("the host answered without a plan")
        if plan.get("refused") is not None:
            raise host_error(plan["refused"])
        if plan.get("live") and plan.get("live_order") != plan.get("order"):
            raise Refused(
                f"another job works on the server: {plan.get('live_order') or 'just begun'}",
                f"run {plan['run']}",
                f"see it with hsx-console watch {plan['run']}, then ask again",
            )
        return plan

    async def perform(
        self, order: Order, plan: Mapping[str, Any], say: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """Run the job that ``plan`` is about to its end; one that is under way is looked at instead.

        Raises the error that it ended with.
        """
        run = str(plan["run"])
        before = await self.runs.status(run)
        cursor = _end_of_events(before)
        if before["state"] in ENDED or before["state"] == "never-started":
            spec = order.to_json(plan.get("process"))
            env = {"HF_HUB_OFFLINE": "0"}  # the server may download; our own runs must not
            launch = Launch(run, "server-job", ["server-job"], spec=spec, env=env, grace=JOB_GRACE)
            await self.runs.launch(launch, int(before.get("attempt") or 0) + 1)
        async for item in follow(self.runs.link.session, run, "events.jsonl", cursor):
            for line in item.lines if isinstance(item, Batch) else ():
                _tell(line, say)
        result = dict(clean_value(result_of(await self.runs.wait_end(run))))
        if result.get("action") != order.action:
            raise Refused(f"another console's {result.get('action')} came first", "", "ask again")
        return result


def _end_of_events(status: Mapping[str, Any]) -> Cursor:
    """Behind what earlier jobs wrote."""
    file = (status.get("files") or {}).get("events.jsonl")
    if not isinstance(file, dict) or not isinstance(file.get("size"), int):
        return START
    return Cursor(file["size"], int(file.get("inode") or 0))


def _tell(line: bytes, say: Callable[[str], None]) -> None:
    try:
        event = decode(line)
    except SpecError:
        return  # torn by a crash; the next line is whole
    if event["type"] == "phase":
        say(clean(f"{event.get('name')}: {event.get('detail')}", 300))


def _objects(value: Any) -> list[dict[str, Any]]:
    cleaned = clean_value(value)
    return [item for item in cleaned if isinstance(item, dict)] if isinstance(cleaned, list) else []
