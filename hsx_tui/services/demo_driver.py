"""The demo behind the console's screen: prepares, starts the run, follows everything, and acts when asked."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from engine.wire.errors import ConnectionFailed, DeadlineExceeded, HostKeyError, HsxError
from engine.wire.verbs import LIVE
from hsx_tui.model.driver import Plan, Post
from hsx_tui.model.messages import (
    Connection,
    HostFactsSeen,
    Link,
    Message,
    Notice,
    RunStatusSeen,
    Step,
    StepState,
)
from hsx_tui.services.demo import Demo
from hsx_tui.services.events import follow_log, run_events
from hsx_tui.services.runs import is_complete

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from hsx_tui.services.demo_options import DemoOptions

OBSERVE_S = 2.0


class DemoDriver:
    """A Driver (hsx_tui/model/driver.py) for one work directory's demo."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self._post: Post = lambda _message: None
        self.demo = Demo(options, self._forward)
        self._retry = asyncio.Event()
        self._status: dict[str, Any] = {}
        self._follow_again = asyncio.Event()
        self._engine_lives = asyncio.Event()
        self._server_up = asyncio.Event()
        self._begun = False
        self._stopping: asyncio.Task[None] | None = None

    def _forward(self, message: Message) -> None:
        if isinstance(message, Step) and message.name == "server" and message.state is StepState.DONE:
            self._server_up.set()
        self._post(message)

    async def run(self, post: Post) -> None:
        """Prepare, start or resume, follow; goes on until cancelled."""
        self._post = post
        self._server_up.clear()
        try:
            await _together(self._work(), self._observe(), self._server_log())
        finally:
            await self.demo.close()

    async def _work(self) -> None:
        await self._begin()
        await _together(self._events(), self._engine_log())

    async def _begin(self) -> None:
        post = self._post
        post(Connection(Link.CONNECTING, host="demo"))
        await self.demo.prepare()
        post(Connection(Link.CONNECTED, host="demo"))
        status = await self.demo.runs.status(self.options.run)
        if not self._begun and not is_complete(status):
            status = await self.demo.runs.ensure(await self.demo.extract())
        self._begun = True  # from here on a run that has ended was ended, perhaps by the user: it stays so
        self._seen(status)

    def _seen(self, status: dict[str, Any]) -> None:
        another = status.get("attempt") != self._status.get("attempt")
        self._status = status
        if another or status.get("state") in LIVE:
            self._follow_again.set()
        if status.get("state") in LIVE:
            self._engine_lives.set()
        else:
            self._engine_lives.clear()
        self._post(RunStatusSeen(status))

    async def _observe(self) -> None:
        """Host, server and run status every two seconds, over one long-lived helper."""
        await self._server_up.wait()
        pause, tries = 0.5, 0
        while True:
            try:
                session = await self.demo.link.session()
                stream = session.observe(
                    OBSERVE_S, url=self.demo.url, paths=[str(self.options.workdir)], runs=[self.options.run]
                )
                async with aclosing(cast("AsyncGenerator[dict[str, Any]]", stream)) as all_facts:
                    async for facts in all_facts:
                        self._post(Connection(Link.CONNECTED, host="demo"))
                        pause, tries = 0.5, 0
                        self._post(HostFactsSeen(facts))
                        for status in facts.get("runs") or []:
                            mine = isinstance(status, dict) and status.get("run") == self.options.run
                            if mine and self._begun:
                                self._note_end(status)
            except (ConnectionFailed, DeadlineExceeded) as error:
                tries += 1
                self._post(Connection(Link.LOST, str(error), pause, host="demo", attempt=tries))
                self._retry.clear()
                try:
                    await asyncio.wait_for(self._retry.wait(), pause)
                except TimeoutError:
                    pause = min(pause * 2, 30.0)

    def _note_end(self, status: dict[str, Any]) -> None:
        ended = self._status.get("state") in LIVE and status["state"] not in LIVE
        self._seen(status)
        if ended and self.options.foreign_traffic:
            self._stopping = asyncio.create_task(self._stop_traffic(), name="stop traffic")

    async def _stop_traffic(self) -> None:
        try:
            await self.demo.stop_traffic()
        except HsxError as error:
            self._post(Notice("warning", f"the foreign traffic goes on: {error}"))

    async def _events(self) -> None:
        """The run's events, again from the host's file after each resume, whoever resumed it."""
        while True:
            async for _event in run_events(self.demo.link, self.options.run, self._post):
                pass
            self._follow_again.clear()
            self._seen(await self._status_at_last())
            await self._follow_again.wait()

    async def _status_at_last(self) -> dict[str, Any]:
        """The run's status, however long the link is down."""
        while True:
            try:
                return await self.demo.runs.status(self.options.run)
            except HostKeyError:
                raise
            except (ConnectionFailed, DeadlineExceeded):
                await asyncio.sleep(OBSERVE_S)  # _observe says that the link is lost

    async def _server_log(self) -> None:
        await self._server_up.wait()
        await follow_log(self.demo.link, self.options.server_run, "server", self._post)
        self._post(Notice("error", "the server has ended; quit and start the demo again to load it anew"))

    async def _engine_log(self) -> None:
        cursor = None
        while True:
            follow = (
                follow_log(self.demo.link, self.options.run, "engine", self._post)
                if cursor is None
                else follow_log(self.demo.link, self.options.run, "engine", self._post, cursor)
            )
            cursor = await follow
            await self._engine_lives.wait()

    async def start(self) -> None:
        """Begin the run, or its next attempt: what is done stays done."""
        await self.resume()

    async def resume(self) -> None:
        """Begin the run's next attempt."""
        self._seen(await self.demo.runs.ensure(await self.demo.extract()))
        if self.options.foreign_traffic:
            await self.demo.runs.ensure(self.demo.traffic_launch())

    async def abort(self) -> None:
        """Stop the run gracefully."""
        self._seen(await self.demo.runs.abort(self.options.run))

    def plan(self, action: str) -> Plan:
        """What an action will do now."""
        o, s = self.options, self._status
        facts = (
            ("Run", f"{o.run}  attempt {s.get('attempt', 0)}  {s.get('state', 'unknown')}"),
            ("Process", f"pid {s.get('pid') or '-'}"),
            ("Store", str(o.store)),
        )
        command = f"hsx-console demo --workdir {o.workdir}"
        if action == "run.abort":
            return Plan(
                "ABORT THE RUN",
                "demo",
                facts,
                (
                    "the engine finishes what is in flight",
                    "it writes the open shard",
                    "it ends; nothing done is lost",
                ),
                "resume it: it goes on with the rows that are not done",
                f"hsx-console run abort {o.run} --config {o.workdir / 'config.toml'} --yes",
                "Abort",
            )
        title = "START THE RUN" if action == "run.start" else "RESUME THE RUN"
        steps = ("preflight and canary", "take the rows that are not done", "check and store each of them")
        return Plan(title, "demo", facts, steps, "abort it: what is done by then is kept", command, "Start")

    def retry_now(self) -> None:
        """Do not wait for the next try to connect."""
        self._retry.set()


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until one fails; its error is raised and the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        for error in errors.exceptions:
            if isinstance(error, HsxError):
                raise error from errors
        raise
