"""Hidden states from an SGLang-compatible server: one request a sample, the dump found by the reply, never
by looking.

The reply's handshake (``meta_info["hsx"]``) names the dump and its id; the file carries the same id, the
request id and the token ids that the forward pass saw. A reply without a handshake, or a promised file that
does not come, is a mismatch with a cause.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from engine.capture.pythonpath.hsx_capture.dumpfile import (
    Dump,
    DumpMissing,
    DumpUnreadable,
    WriterFailed,
    read_dump,
    remove_dump,
)
from engine.capture.states import Finding, States
from engine.sources.feeding import answer_all
from engine.sources.gate import Gate
from engine.sources.protocol import Ask, SourceFacts, Taken
from engine.sources.sglang_api import Api
from engine.wire.causes import Cause
from engine.wire.errors import UsageError
from engine.wire.ids import parse_rid, run_prefix

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from engine.dataset.tokens import Sample
    from engine.wire.spec import SourceSpec

_FILE_WAIT_S = 20.0
"""How long a promised dump may take to appear: the reply is sent before the writer is done."""


@dataclass(frozen=True)
class _Flight:
    """A request in flight. ``company``: the samples that were in flight at some moment beside it, by row."""

    sample: Sample
    company: dict[int, Sample]


class SGLangSource:
    """A Source over HTTP. Attribution is by request id."""

    attribution = "rid"

    def __init__(self, spec: SourceSpec, concurrency: int) -> None:
        self.spec = spec
        self.api = Api(spec.url, spec.api_key_env, spec.timeout_s, concurrency + 2)
        self.folder = Path(spec.dump_dir)
        self._gate = Gate(concurrency)
        self._concurrency = concurrency
        self._flying: dict[str, _Flight] = {}

    async def describe(self) -> SourceFacts:
        """Settings as /server_info and /model_info give them, with what speaks against a capture."""
        info = await self.api.get("/server_info")
        return read_facts(info)

    async def ready(self) -> bool:
        """Whether the server would take a request now (GET /ready: nothing is generated)."""
        return await self.api.ready()

    async def clear(self, run: str) -> int:
        """Remove the dumps of ``run`` by exact name. Nothing is aborted: the server ends a request whose
        client
        is gone by itself, and aborting goes by prefix, so it would hit a run whose name begins like ours."""
        return await asyncio.to_thread(self._clear, run)

    def _clear(self, run: str) -> int:
        names = {p.name.split(".")[0] for p in self.folder.glob(f"{run_prefix(run)}*")}
        ours = [name for name in names if (parsed := parse_rid(name)) and parsed.run == run]
        for name in ours:
            remove_dump(self.folder, name)
        return len(ours)

    def take(self, asks: AsyncIterator[Ask]) -> AsyncGenerator[Taken, None]:
        """Answer every ask, up to the concurrency at once, those not yet looked at included."""
        return answer_all(asks, self._ask, self._gate, self._concurrency)

    async def _ask(self, ask: Ask) -> Taken:
        began = time.monotonic()
        flight = _Flight(ask.sample, {f.sample.row: f.sample for f in self._flying.values()})
        for other in self._flying.values():
            other.company[ask.sample.row] = ask.sample
        self._flying[ask.rid] = flight
        try:
            result = await self._request(ask)
        finally:
            del self._flying[ask.rid]
        flying = tuple(flight.company.values())
        seconds = time.monotonic() - began
        if isinstance(result, States):
            return Taken(ask, states=result, request_s=seconds, flying=flying)
        await asyncio.to_thread(self._forget, ask.rid)
        if isinstance(result, Finding):
            return Taken(ask, finding=result, request_s=seconds, flying=flying)
        return Taken(ask, lost=result, request_s=seconds, flying=flying)

    def _forget(self, rid: str) -> None:
        """Remove a dump that nobody will read; one that comes later still is removed at the end of the
        run."""
        try:
            remove_dump(self.folder, rid)
        except OSError:
            return  # the folder is gone or not ours: preflight and the next dump say so

    async def _request(self, ask: Ask) -> States | Finding | str:
        """States, a finding, or a text: the link failed and nothing is known."""
        body = {
            "rid": ask.rid,
            "input_ids": list(ask.sample.input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "extra_key": ask.rid,  # a prefix cache never answers for another request
            "stream": False,
        }
        try:
            response = await self.api.generate(body)
        except httpx.ReadTimeout:
            await self.api.abort(ask.rid)
            if not await self.api.ready():
                return f"no answer within {self.spec.timeout_s:g} s, and the server is not ready"
            return Finding(Cause.LATE, round(self.spec.timeout_s), None, {"timeout_s": self.spec.timeout_s})
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        if response.status_code != 200:
            return refusal(response, len(ask.sample.input_ids), self.spec.url)
        try:
            meta = response.json()["meta_info"]
            shake = meta.get("hsx")
            prompt_tokens = int(meta.get("prompt_tokens", -1))
        except (ValueError, KeyError, TypeError, AttributeError):
            return Finding(
                Cause.UNREADABLE, "an answer that is not SGLang's", None, {"text": response.text[:200]}
            )
        try:
            return await self._dump(ask, meta, shake, prompt_tokens)
        except OSError as error:
            return Finding(Cause.UNREADABLE, "the dump folder", None, {"why": str(error)[:200]})

    async def _dump(
        self, ask: Ask, meta: Mapping[str, Any], shake: object, prompt_tokens: int
    ) -> States | Finding | str:
        if meta.get("id") != ask.rid:
            return Finding(Cause.FOREIGN, str(meta.get("id"))[:80], ask.rid, {"where": "the reply"})
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return f"the server aborted the request ({str(reason.get('message'))[:80]})"
        shake = (
            shake[0] if isinstance(shake, list) and shake else shake
        )  # SGLang: one element a generated token
        if not isinstance(shake, dict):
            return Finding(Cause.NO_HANDSHAKE, None, "hsx", {"meta_keys": sorted(map(str, meta))[:20]})
        if "error" in shake:
            return Finding(Cause.WRITER_ERROR, str(shake["error"])[:200], None, {})
        n = len(ask.sample.input_ids)
        if prompt_tokens != n:
            return Finding(Cause.TRUNCATED_INPUT, prompt_tokens, n, {"where": "the reply"})
        return await asyncio.to_thread(self._read, ask, shake)

    def _read(self, ask: Ask, shake: Mapping[str, Any]) -> States | Finding:
        name = f"{ask.rid}.safetensors"
        if Path(str(shake.get("path"))).name != name:
            return Finding(Cause.FOREIGN, str(shake.get("path"))[:120], name, {"where": "the handshake"})
        deadline = time.monotonic() + _FILE_WAIT_S
        while True:
            try:
                dump = read_dump(self.folder, ask.rid)
                break
            except DumpMissing:
                if time.monotonic() > deadline:
                    return Finding(Cause.MISSING, None, name, {"waited_s": _FILE_WAIT_S})
                time.sleep(0.005)
            except WriterFailed as error:
                remove_dump(self.folder, ask.rid)
                return Finding(Cause.WRITER_ERROR, str(error)[:200], None, {})
            except DumpUnreadable as error:
                return Finding(Cause.UNREADABLE, str(error)[:200], None, {})
        remove_dump(self.folder, ask.rid)
        return judge_dump(dump, ask.sample.input_ids, str(shake.get("dump_id")))

    async def aclose(self) -> None:
        """Close the connections."""
        await self.api.aclose()


def judge_dump(dump: Dump, ids: tuple[int, ...], promised: str) -> States | Finding:
    """A dump as it was read -> states; or what the writer itself says against it."""
    meta, n = dump.meta, len(ids)
    if meta.dump_id != promised:
        return Finding(
            Cause.STALE, meta.dump_id, promised, {"why": "the file is not the one that the reply promised"}
        )
    if meta.ok and dump.aux is not None:
        return States(
            meta.rid,
            dump.input_ids,
            dump.aux,
            dump.last,
            dump.pre,
            meta.num_tokens,
            meta.taps,
            tuple(c.to_json() for c in meta.chunks),
            {"dump_id": meta.dump_id, "model": meta.model},
        )
    why = {"why": meta.error[:200], "chunks": [c.to_json() for c in meta.chunks][:32]}
    rows = sum(c.rows for c in meta.chunks)
    start = meta.chunks[0].start if meta.chunks else 0
    if start > 0:
        return Finding(Cause.PREFIX_CACHED, rows, n, {**why, "missing_prefix": start})
    if not meta.ids_checked or tuple(dump.input_ids.tolist()) != ids:
        return Finding(Cause.IDS_DIFFER, rows, n, why)
    return Finding(Cause.PARTIAL_CHUNK if rows != n else Cause.WRITER_ERROR, rows, n, why)


def refusal(response: httpx.Response, n: int, url: str) -> Finding | str:
    """A status other than 200: a finding about this row, or a text: nothing is known, it may be asked again.

    Raises UsageError when the server does not let us in at all.
    """
    code, text = response.status_code, " ".join(response.text[:300].split())
    if code in (401, 403):
        raise UsageError(f"the server at {url} refuses us", f"HTTP {code}: {text}", "set source.api_key_env")
    if code >= 500 or code in (408, 409, 429) or (code == 400 and "Duplicate" in text):
        return f"HTTP {code}: {text}"
    cause = Cause.TRUNCATED_INPUT if "longer than" in text else Cause.MISSING
    return Finding(cause, None, n, {"http": code, "text": text})


def read_facts(info: Mapping[str, Any]) -> SourceFacts:
    """/server_info -> SourceFacts. ``problems`` are settings under which a capture would be wrong or
    empty."""
    problems = []
    if not info.get("enable_return_aux_hidden_states"):
        problems.append("the server was not started with --enable-return-aux-hidden-states")
    if info.get("speculative_algorithm"):
        problems.append(
            f"speculative decoding ({info['speculative_algorithm']}) is on: rows would be a draft's"
        )
    if int(info.get("pp_size") or 1) != 1:
        problems.append(f"pp_size is {info['pp_size']}: capture needs 1")
    layers = info.get("return_aux_hidden_state_layer_ids")
    flags = (
        "chunked_prefill_size",
        "disable_radix_cache",
        "enable_mixed_chunk",
        "max_running_requests",
        "tp_size",
        "dp_size",
        "pp_size",
        "attention_backend",
        "context_length",
        "dtype",
    )
    return SourceFacts(
        model=str(info.get("model_path", "")),
        dtype=str(info.get("dtype", "")).removeprefix("torch."),
        version=str(info.get("version", "")),
        layers=tuple(int(x) for x in layers) if isinstance(layers, list) else None,
        context_length=int(info.get("context_length") or 0),
        flags={k: info.get(k) for k in flags}
        | {"launch_command": str(info.get("launch_command", ""))[:2000]},
        problems=tuple(problems),
    )
