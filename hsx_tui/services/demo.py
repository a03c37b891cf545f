"""The demo's host, server, dataset and run: prepared step by step, each step safe to repeat.

Everything is done over SSH, as on any host; the demo knows its paths because it made the host's work
directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.wire.durable import atomic_bytes
from engine.wire.errors import DeadlineExceeded, HsxError, Refused
from engine.wire.verbs import ENDED, LIVE
from hsx_tui.deploy.embedded import ensure_host, host_address, read_host, stop_host
from hsx_tui.deploy.link import Link
from hsx_tui.deploy.tail import Batch, Eof, follow
from hsx_tui.model.messages import Message, Notice, ServerLog, Step, StepState
from hsx_tui.services.demo_config import write_config
from hsx_tui.services.events import follow_log
from hsx_tui.services.runs import Launch, Runs, Status, how_it_ended, result_of
from hsx_tui.text import clean

if TYPE_CHECKING:
    from hsx_tui.services.demo_options import DemoOptions

Post = Callable[[Message], None]

LOAD_DEADLINE_S = 900.0
_PROCESS = re.compile(rb"Started server process \[(\d{1,10})\]")
_LISTENS = re.compile(rb"Uvicorn running on (http://127\.0\.0\.1:\d{1,5})")
TRAFFIC = "traffic"
LATE_S = 8
"""In counter mode some dumps land so long after the answer: longer than the engine waits for one."""
EARLIER_S = 6
"""How long others use the server in its earlier life."""


class ListeningLine:
    """Finds where the server process ``pid`` listens, in a log that earlier processes wrote to, too."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._writing: int | None = None

    def feed(self, line: bytes) -> str | None:
        """The address, once its line comes."""
        if started := _PROCESS.search(line):
            self._writing = int(started[1])
        listens = _LISTENS.search(line)
        return listens[1].decode() if listens and self._writing == self._pid else None


class Demo:
    """One work directory's demo. ``post`` hears what is going on."""

    def __init__(self, options: DemoOptions, post: Post) -> None:
        options.check()
        self.options = options
        self.post = post
        self.url: str | None = None
        self._memory = options.workdir / "demo.json"
        self.link = Link(self._address)
        self.runs = Runs(self.link)

    def _address(self) -> Any:
        record = read_host(self.options.workdir)
        if record is None:
            raise Refused("the embedded host does not run", "it was stopped", "start the demo again")
        return host_address(self.options.workdir.absolute(), int(record["port"]))

    async def prepare(self) -> None:
        """Host, engine, server and dataset, ready for the run."""
        await self._step("embedded host", self._host)
        await self._step("engine", self._engine)
        await self._step("not busy", self._not_busy, quiet=True)
        await self._step("server", self._server)
        await self._step("dataset", self._dataset)
        if self.options.foreign_traffic:
            await self._step("foreign traffic", self._traffic)
        await self._write_config()

    async def _step(self, name: str, work: Callable[[], Awaitable[str]], *, quiet: bool = False) -> None:
        if not quiet:
            self.post(Step(name, StepState.ACTIVE))
        try:
            detail = await work()
        except HsxError as error:
            self.post(Step(name, StepState.FAILED, str(error)))
            raise
        if not quiet:
            self.post(Step(name, StepState.DONE, detail))

    async def _host(self) -> str:
        address = await ensure_host(self.options.workdir)
        return str(address)

    async def _engine(self) -> str:
        session = await self.link.session()
        engine = session.engine
        assert engine is not None  # Link.session installs it
        return f"{engine.state} {engine.id[:12]}"

    async def _not_busy(self) -> str:
        """One extraction at a time on the demo host: it has one small server."""
        for status in await self.runs.all():
            if (
                status.get("kind") == "extract"
                and status["state"] in LIVE
                and status["run"] != self.options.run
            ):
                raise Refused(
                    f"the demo host in {self.options.workdir} is busy with run {status['run']}",
                    "it has one small server",
                    "wait for it, or use another --workdir",
                )
        return ""

    async def _server(self) -> str:
        """The server with the asked-for flags, loaded and ready; another one is stopped first."""
        o = self.options
        for status in await self.runs.all():
            if status.get("kind") == "server" and status["state"] in LIVE and status["run"] != o.server_run:
                await self.runs.abort(TRAFFIC)
                await self.runs.abort(status["run"])
                await self.runs.wait_end(status["run"])
        status = await self.runs.ensure(self._serve())
        known = self._recall("servers").get(o.server_run, {})
        if known.get("attempt") == status["attempt"]:
            self.url = str(known["url"])
        else:
            self.url = await self._wait_listening(o.server_run)
            self._remember("servers", {o.server_run: {"attempt": status["attempt"], "url": self.url}})
        await self._wait_ready(o.server_run)
        if o.counter:
            await self._earlier_life(int(status["attempt"]))
        return self.url

    async def _earlier_life(self, attempt: int) -> None:
        """Let a new server work and restart it: its counter begins at 0 again, over the dumps of its
        earlier life, as after any restart of a server that was patched in the field."""
        name, lives = self.options.server_run, self._recall("lives")
        if lives.get(name) == attempt:
            return
        self._remember("lives", {name: attempt + 1})
        await self._dataset()
        args = ["demo", "traffic", "--url", str(self.url), "--seed", "1", "--max-seconds", str(EARLIER_S)]
        await self.runs.ensure(Launch(TRAFFIC, "traffic", args, grace=(5.0, 2.0)))
        await self.runs.wait_end(TRAFFIC)
        await self.runs.abort(name)
        await self.runs.wait_end(name)
        await self._server()

    def _serve(self) -> Launch:
        o = self.options
        if o.sglang:
            return self._serve_sglang()
        args = [
            "demo",
            "serve",
            "--model",
            o.model,
            "--model-cache",
            str(o.model_cache),
            "--port",
            "0",
            "--dump-dir",
            self.dump_dir,
            "--taps",
            " ".join(map(str, o.taps)),
            "--chunked-prefill-size",
            str(o.chunk_tokens),
        ]
        if o.counter:
            args += ["--dump-mode", "counter", "--dump-late", str(LATE_S)]
        if o.kind:
            args += ["--sabotage", o.kind, "--sabotage-log", str(o.workdir / "sabotage.jsonl")]
        if o.prefix_cache:
            args.append("--enable-prefix-cache")
        return Launch(o.server_run, "server", args, grace=(20.0, 5.0))

    def _serve_sglang(self) -> Launch:
        o = self.options
        args = ["demo", "sglang", "--python", str(o.sglang_path), "--model", o.model]
        args += ["--model-cache", str(o.model_cache), "--dump-dir", self.dump_dir]
        args += ["--taps", " ".join(map(str, o.taps)), "--chunked-prefill-size", str(o.chunk_tokens)]
        return Launch(o.server_run, "server", args, grace=(20.0, 5.0))

    @property
    def dump_dir(self) -> str:
        """A private folder in /dev/shm with a random name, the same for this work directory and dump
        mode."""
        key = "counter" if self.options.counter else "path"
        known = self._recall("dump_dir").get(key)
        if isinstance(known, str):
            return known
        path = f"/dev/shm/hsx-{os.getuid()}-{secrets.token_hex(6)}"
        self._remember("dump_dir", {key: path})
        return path

    async def _wait_listening(self, run: str) -> str:
        """The address that the server's own log names. The log goes on over attempts, so the line must be
        that of the process that runs now."""
        pid = await self._pid(run)
        found = ListeningLine(pid)
        async with asyncio.timeout(LOAD_DEADLINE_S):
            async for item in follow(self.link.session, run, "stdio.log"):
                if isinstance(item, Batch) and item.lines:
                    self.post(ServerLog([clean(line.decode(errors="replace")) for line in item.lines]))
                    for line in item.lines:
                        url = found.feed(line)
                        if url is not None:
                            return url
                if isinstance(item, Eof):
                    break
        raise self._server_failed(await self.runs.status(run))

    async def _pid(self, run: str) -> int:
        """The process of the run, as soon as it has one."""
        while True:
            status = await self.runs.status(run)
            if isinstance(status.get("pid"), int):
                return int(status["pid"])
            if status["state"] in ENDED:
                raise self._server_failed(status)
            await asyncio.sleep(0.1)

    async def _wait_ready(self, run: str) -> None:
        """/ready answers 200; never /health, which generates."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOAD_DEADLINE_S
        while True:
            server = (await self.facts()).get("server") or {}
            if server.get("ready"):
                return
            status = await self.runs.status(run)
            if status["state"] in ENDED:
                raise self._server_failed(status)
            if loop.time() > deadline:
                raise DeadlineExceeded(
                    "the server is not ready", f"it had {LOAD_DEADLINE_S:.0f} s", "see its log"
                )
            await asyncio.sleep(0.5)

    def _server_failed(self, status: Status) -> HsxError:
        try:
            result_of(status)
        except HsxError as error:
            return error
        return how_it_ended(status)

    async def facts(self) -> Mapping[str, Any]:
        """HostFacts, asked once."""
        paths = [str(self.options.workdir)]
        facts = (await self.runs.call("probe", url=self.url, paths=paths)).get("facts")
        return facts if isinstance(facts, dict) else {}

    async def model(self) -> str:
        """The model folder as the server has it."""
        info = ((await self.facts()).get("server") or {}).get("info") or {}
        return str(info.get("model_path", self.options.model))

    async def _dataset(self) -> str:
        o = self.options
        what = Launch(
            o.dataset_run,
            "complete",
            ["demo", "dataset", str(o.dataset), "--model", await self.model(), "--url", str(self.url)],
        )
        await self.runs.ensure(what)
        await follow_log(
            self.link, o.dataset_run, "engine", self.post
        )  # prompt by prompt, until it has ended
        result = result_of(await self.runs.wait_end(o.dataset_run))
        rows = int(result["rows"])
        if o.samples is not None and o.samples > rows:
            raise Refused(
                f"--samples {o.samples}", f"the demo's dataset has {rows} rows", f"give at most {rows}"
            )
        self._remember("rows", {o.dataset_run: rows})
        return f"{o.samples or rows} of {rows} rows"

    async def _traffic(self) -> str:
        await self.runs.ensure(self.traffic_launch())
        return "as many foreign requests as ours, a health check every 2 s"

    def traffic_launch(self) -> Launch:
        """The foreign traffic, a process of its own."""
        return Launch(TRAFFIC, "traffic", ["demo", "traffic", "--url", str(self.url)], grace=(5.0, 2.0))

    async def stop_traffic(self) -> None:
        """End the foreign traffic."""
        await self.runs.abort(TRAFFIC, (5.0, 2.0))

    async def extract(self) -> Launch:
        """The extraction as it will be started or resumed."""
        o = self.options
        rows = self._recall("rows").get(o.dataset_run)
        spec = {
            "run": o.run,
            "store": str(o.store),
            "dataset": {"path": str(o.dataset), "max_tokens": 2047, "rows": [0, o.samples or rows]},
            "target": {
                "model": await self.model(),
                "taps": list(o.taps),
                "last": o.last,
                "dtype": "bfloat16",
            },
            "source": {
                "kind": "sglang",
                "url": self.url,
                "dump_dir": self.dump_dir,
                "dump_mode": o.dump_mode,
            },
            # Doubt is frequent beside others' requests when nothing but a count tells dumps apart.
            "attempts": 6 if o.counter else 3,
            "concurrency": o.concurrency,
            "shard_bytes": o.shard_bytes,
            "shard_seconds": 5.0,
            "retake_every": 32,
        }
        return Launch(o.run, "extract", ["extract"], output=str(o.store), spec=spec)

    async def verify(self, *, recompute: bool) -> Mapping[str, Any]:
        """The store read again on the host; ``recompute``: each sample against a lone forward, too."""
        o = self.options
        args = ["verify", str(o.store), "--json", *(["--recompute"] if recompute else [])]
        return await self.runs.anew(Launch(o.verify_run(recompute=recompute), "verify", args))

    async def stop_all(self) -> bool:
        """End everything of this work directory; False when nothing ran."""
        ran = read_host(self.options.workdir) is not None
        if not ran:
            if not (self.options.workdir / "keys").is_dir():
                return False
            await ensure_host(self.options.workdir)  # it died, but what it started may go on
        live = [s for s in await self.runs.all() if s["state"] in LIVE]
        for kind in ("traffic", "extract", "verify", "complete", "server"):
            for status in live:
                if status.get("kind") == kind:
                    await self.runs.abort(status["run"])
                    await self.runs.wait_end(status["run"])
        await self.close()
        await stop_host(self.options.workdir)
        for folder in self._recall("dump_dir").values():
            shutil.rmtree(folder, ignore_errors=True)
        return ran or bool(live)

    async def close(self) -> None:
        """Give the connection back; what runs on the host goes on."""
        await self.link.close()

    async def _write_config(self) -> None:
        rows = self.options.samples or self._recall("rows").get(self.options.dataset_run)
        model = await self.model()
        try:
            write_config(self.options, str(self.url), self.dump_dir, model, int(rows or 1))
        except OSError as error:
            self.post(Notice("warning", f"config.toml of the demo could not be written: {error.strerror}"))

    def _recall(self, key: str) -> dict[str, Any]:
        try:
            value = json.loads(self._memory.read_bytes()).get(key)
        except (OSError, ValueError, AttributeError):
            return {}
        return value if isinstance(value, dict) else {}

    def _remember(self, key: str, value: dict[str, Any]) -> None:
        """Facts about what was started, so that the same command finds it again. Lost facts are found out
        anew."""
        try:
            data = json.loads(self._memory.read_bytes())
        except (OSError, ValueError):
            data = {}
        data[key] = {**(data.get(key) if isinstance(data.get(key), dict) else {}), **value}
        atomic_bytes(self._memory, json.dumps(data).encode())


def default_workdir() -> Path:
    """Where the demo lives when nothing is said: the platform's state folder."""
    import platformdirs

    return Path(platformdirs.user_state_dir("hsx-console")) / "demo"


def default_model_cache() -> Path:
    """Where the converted demo model is kept, shared by all work directories."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("hsx-console")) / "models"
