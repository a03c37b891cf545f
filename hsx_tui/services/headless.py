"""The demo without a screen: the same job, lines for people on stderr, one JSON object at the end
(cli.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.wire.errors import ExitCode, HsxError
from engine.wire.verbs import ENDED, LIVE
from hsx_tui.commands.output import talk
from hsx_tui.model.messages import Connection, Link, Message, Notice, ServerLog, Step, StepState
from hsx_tui.services.abort_mark import AbortMark, percent_of
from hsx_tui.services.demo import Demo
from hsx_tui.services.events import run_events
from hsx_tui.services.runs import how_it_ended, is_complete, result_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hsx_tui.services.demo_options import DemoOptions

_NO_TRAFFIC = {"ours": 0, "foreign": 0, "health": 0, "shared_forwards": 0, "chunks": 0, "largest_batch": 0}


_TOLD = ("shards:", "Load weight", "fired up", "Converting", "answered with")
"""Of the logs, lines with these words are told while the demo is prepared."""


def say_message(message: Message) -> None:
    """What a person without a screen wants to hear."""
    if isinstance(message, Step) and message.state is not StepState.PENDING:
        mark = {StepState.ACTIVE: "..", StepState.DONE: "ok", StepState.FAILED: "XX"}[message.state]
        talk(f"[{mark}] {message.name}{': ' if message.detail else ''}{message.detail}")
    elif isinstance(message, Notice):
        talk(f"{message.level}: {message.text}")
    elif isinstance(message, Connection) and message.state is Link.LOST:
        talk(f"link lost: {message.cause}; trying again in {message.retry_in_s or 0:.1f} s")
    elif isinstance(message, ServerLog):
        for line in message.lines:
            if any(words in line for words in _TOLD):
                talk(f"     {line}")


class Headless:
    """One headless demo: prepare, start or resume, follow, verify, report."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.demo = Demo(options, say_message)
        self.mismatches: list[dict[str, Any]] = []
        self._progress: Mapping[str, Any] = {}
        self._mark: AbortMark | None = None

    async def run(self) -> tuple[dict[str, Any], ExitCode]:
        """(the final object, the exit code)."""
        demo = self.demo
        try:
            await demo.prepare()
            status = await demo.runs.status(self.options.run)
            if not is_complete(status):
                status = await demo.runs.ensure(await demo.extract())
                if self.options.abort_at is not None:
                    self._mark = AbortMark(self.options.abort_at, int(status.get("attempt") or 0))
            await self._follow()
            status = await demo.runs.wait_end(self.options.run)
            traffic = await self._traffic()
            if self.options.foreign_traffic:
                await demo.stop_traffic()
            return await self._report(status, traffic)
        finally:
            await demo.close()

    async def _follow(self) -> None:
        """Follow the run's events to their end; abort once when it crosses --abort-at."""
        async for event in run_events(self.demo.link, self.options.run, lambda _message: None):
            kind = event["type"]
            crossed = self._mark is not None and self._mark.crossed_by(event)
            if kind == "mismatch":
                self.mismatches.append(
                    {k: event.get(k) for k in ("row", "cause", "got", "expected", "outcome")}
                )
                talk(
                    f"WARNING sample {event.get('row')}: {event.get('cause')} "
                    f"got {event.get('got')}, expected {event.get('expected')} ({event.get('outcome')})"
                )
            elif kind == "progress":
                self._on_progress(event)
                if crossed:
                    await self._abort()
            elif kind == "phase":
                talk(f"     {event.get('name')}: {event.get('detail', '')}")
            elif kind in ("warning", "paused"):
                talk(f"WARNING {event.get('text') or event.get('reason')}")

    def _on_progress(self, event: Mapping[str, Any]) -> None:
        self._progress = event
        eta = event.get("eta_s")
        talk(
            f"     {percent_of(event):5.1f} %  done {event.get('done')}  {event.get('tok_per_s')} tok/s  "
            f"ETA {'?' if eta is None else f'{float(eta):.0f} s'}"
        )

    async def _abort(self) -> None:
        """Abort the attempt, unless it has ended or is stopping."""
        status = await self.demo.runs.status(self.options.run)
        if status["state"] in LIVE and not status.get("stop"):
            talk(f"     aborting at {percent_of(self._progress):.1f} %")
            await self.demo.runs.abort(self.options.run)

    async def _traffic(self) -> dict[str, int]:
        info = ((await self.demo.facts()).get("server") or {}).get("info") or {}
        seen = (info.get("hsx_demo") or {}).get("traffic") or {}
        return {k: int(seen.get(k, 0)) for k in _NO_TRAFFIC}

    def _told(self, traffic: dict[str, int], server: Mapping[str, Any]) -> dict[str, int]:
        """The embedded server counts for itself; of a real SGLang the capture plugin tells it."""
        told = server.get("traffic") or {}
        return {k: int(told.get(k, 0)) for k in traffic} if self.options.sglang else traffic

    async def _report(
        self, status: Mapping[str, Any], traffic: dict[str, int]
    ) -> tuple[dict[str, Any], ExitCode]:
        error: HsxError | None = None
        result: Mapping[str, Any] = {}
        try:
            result = result_of(dict(status))
        except HsxError as found:
            error = found
        if status["state"] in ENDED and not result and error is None:
            error = how_it_ended(dict(status))
        if error is not None and error.exit_code is not ExitCode.FINDING and not self.options.store.exists():
            raise error
        # After a kill the store is read again, but not compared: the same command will do both at the end.
        talk(f"[..] verify: {'hashes and accounting' if error else 'every sample against a lone forward'}")
        report = await self.demo.verify(recompute=error is None)
        verified = report.get("verified") or {"samples": 0, "min_cosine": None}
        talk(
            f"[ok] verify: done {report['done']}, quarantined {report['quarantined']}, pending "
            f"{report['pending']}, bad {len(report['bad'])}; {verified['samples']} compared, least cosine "
            f"{verified['min_cosine']}"
        )
        out: dict[str, Any] = {
            "schema_version": 1,
            "run": self.options.run,
            "store": str(self.options.store),
            "dataset": report["dataset"],
            "done": report["done"],
            "quarantined": report["quarantined"],
            "pending": report["pending"],
            "mismatches": self.mismatches,
            "traffic": self._told(traffic, result.get("server") or {}),
            "verified": verified,
            "bad": report["bad"],
            "tokens": result.get("tokens", self._progress.get("tokens", 0)),
            "tok_per_s": result.get("tok_per_s", self._progress.get("tok_per_s", 0.0)),
            "wall_s": result.get("wall_s"),
            "server": result.get("server")
            or {"model": await self.demo.model(), "attribution": "count" if self.options.counter else "rid"},
        }
        if error is not None:
            out["error"] = error.to_json()
            talk(f"hsx-console: {error}")
        complete = report["done"] == report["dataset"] and not report["bad"]
        if complete:
            return out, ExitCode.OK
        return out, error.exit_code if error is not None else ExitCode.FINDING
