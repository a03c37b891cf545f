"""Runs on a host, as the console starts, watches and ends them: every call is safe to repeat, so a lost
link is retried."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.wire.errors import HsxError, RemoteError
from engine.wire.verbs import ENDED, LIVE
from hsx_tui.deploy.bundle import engine_argv
from hsx_tui.text import clean, host_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hsx_tui.deploy.link import Link

Status = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A command of the engine to run under the host's supervisor.

    Attributes:
        args: what follows ``python -m engine``.
        output: a folder that only one run may write to at a time.
        spec: the run specification, stored beside it.
        grace: seconds from TERM to INT and from INT to KILL.
    """

    run: str
    kind: str
    args: Sequence[str]
    output: str | None = None
    spec: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace: tuple[float, float] = (120.0, 15.0)


class Runs:
    """The runs of one host."""

    def __init__(self, link: Link) -> None:
        self.link = link

    async def call(self, verb: str, **args: Any) -> dict[str, Any]:
        """One verb, again after a lost link (``Link.call``)."""
        return await self.link.call(verb, **args)

    async def status(self, run: str) -> Status:
        """RunStatus of a run."""
        answer = await self.call("status", run=run)
        return _status(answer)

    async def all(self) -> list[Status]:
        """RunStatus of every run on the host."""
        runs = (await self.call("list")).get("runs")
        return runs if isinstance(runs, list) else []

    async def launch(self, what: Launch, attempt: int) -> Status:
        """Begin attempt ``attempt`` (once, however often it is asked)."""
        session = await self.link.session()
        engine = session.engine
        if engine is None:
            raise RemoteError("the engine is not installed on the host")
        answer = await self.call(
            "start",
            run=what.run,
            attempt=attempt,
            kind=what.kind,
            cwd="/",
            output=what.output,
            argv=engine_argv(engine.python, engine.dir, *what.args),
            spec=what.spec,
            grace=list(what.grace),
            env={"HSX_ENGINE_ID": engine.id, "HF_HUB_OFFLINE": "1", **what.env},
        )
        return _status(answer)

    async def ensure(self, what: Launch) -> Status:
        """Attach to the run if it is alive, else begin its next attempt."""
        status = await self.status(what.run)
        if status["state"] in LIVE:
            return status
        return await self.launch(what, int(status.get("attempt") or 0) + 1)

    async def abort(self, run: str, grace: tuple[float, float] = (120.0, 15.0)) -> Status:
        """Ask for the graceful stop."""
        return _status(await self.call("abort", run=run, grace=list(grace)))

    async def wait_end(self, run: str, poll_s: float = 0.5) -> Status:
        """Wait until the run has ended (however it did)."""
        while True:
            status = await self.status(run)
            if status["state"] in ENDED or status["state"] == "never-started":
                return status
            await asyncio.sleep(poll_s)

    async def finished(self, what: Launch) -> Mapping[str, Any]:
        """Run a command to its end and return its result; its own error is raised."""
        await self.ensure(what)
        return result_of(await self.wait_end(what.run))

    async def anew(self, what: Launch) -> Mapping[str, Any]:
        """``finished`` by an attempt of its own: one that lives already may have begun too early for it."""
        before = await self.wait_end(what.run)
        await self.launch(what, int(before.get("attempt") or 0) + 1)
        return result_of(await self.wait_end(what.run))


def result_of(status: Status) -> Mapping[str, Any]:
    """The result that an ended run wrote; raises the error that it ended with, its text cleaned."""
    result = status.get("result")
    if isinstance(result, dict) and isinstance(result.get("error"), dict):
        raise host_error(result["error"])
    if isinstance(result, dict):
        return result
    raise how_it_ended(status)


def how_it_ended(status: Status) -> HsxError:
    """A run that ended without a result, in words."""
    ended = status.get("exit")
    ended = ended if isinstance(ended, dict) else {}
    if status.get("state") == "lost-reboot":
        why = "the host was restarted"
    elif status.get("state") == "lost-killed":
        why = "the engine and its supervisor were killed"
    elif ended.get("signal"):
        why = clean(f"it was killed by signal {ended['signal']}")
    elif ended.get("error"):
        why = clean(str(ended["error"]))
    else:
        why = clean(f"exit status {ended.get('rc')}")
    return RemoteError(
        clean(f"run {status.get('run')} ended without a result"),
        why,
        "what is done is kept: the same command resumes it",
    )


def is_complete(status: Mapping[str, Any]) -> bool:
    """Whether the run has ended with every row settled: nothing is left to resume."""
    result = status.get("result")
    return status["state"] in ENDED and isinstance(result, dict) and result.get("outcome") == "complete"


def _status(answer: Mapping[str, Any]) -> Status:
    status = answer.get("status")
    if not isinstance(status, dict) or not isinstance(status.get("state"), str):
        raise RemoteError("the host answered without a status")
    return status
