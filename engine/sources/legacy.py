"""Hidden states from a server that was patched in the field and writes counter-numbered dumps.

Its replies name no dump. So one request of ours is in flight at a time; the folder is looked at before it is
sent and after it was answered, and what is new in between is matched by token ids where the dumps have them,
else by the number of tokens (legacy_match.py). Doubt is a finding, and the request is sent again.

By count, a stranger's dump of our length may be whole before ours has begun, under a lower number. So nothing
is taken by count before a settling time has passed: after the answer, as long as the slowest dump that was
taken in this run took to land, and a moment after the one that fits was first seen. Two of that length are
ambiguous then. Where others use the server (another dump than ours was seen in this run), a dump that was
taken by count may have been theirs, and the real one may land in a later request's time. So its length is
owed for as long as a dump may take: the next dump of that length that stands alone is not credited to another
row, and that request is sent again at once. What this leaves to the content evidence: ours lands later than
the settling time, and the stranger was the first one ever seen.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from engine.capture.legacy import DONE, LegacyUnreadable
from engine.capture.legacy_folder import LegacyFolder, Scan, Seen, changed, touched
from engine.capture.legacy_match import Match, Piece, Window, explain, match, naive, parts
from engine.capture.states import Finding, States
from engine.sources.feeding import answer_all
from engine.sources.protocol import Ask, SourceFacts, Taken
from engine.sources.replies import refusal
from engine.sources.sglang import read_facts
from engine.sources.sglang_api import Api
from engine.wire.causes import Cause
from engine.wire.errors import UsageError
from engine.wire.ids import MAX_ATTEMPT, rid

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from engine.capture.legacy import LegacyDump
    from engine.wire.spec import ExtractSpec

WAIT_S = 5.0
"""How long after the answer a dump may take to land, and a second more for every 1000 tokens."""

_SETTLE_S = 0.25
"""By count nothing is taken before: so long after the answer, and after the dump that fits was seen."""

_GAPS_S = 0.25
"""How long a match waits for dumps of lower numbers that are not there yet: one may have as many tokens."""

_PARTS_S = 1.0
"""Pieces that make up the prompt are taken for all that comes after so long."""

_POLL_S = 0.02

_REPEATED_FROM, _CANARY_FROM, _REPEATS = 80, 90, 4
"""An attempt at a row is sent once, since the loop counts attempts. Retakes and the canary (from this number
on) are not asked for again by who asks, so here the request is repeated."""

_EXAMPLES = 8
"""So many dumps of each cause that were passed over on the way to the right one are told in a run."""

_PROBE = (101, 102, 103, 104, 105)


@dataclass(frozen=True)
class _Answer:
    """What one request left: its states, or a finding, or a text (nothing is known)."""

    result: States | Finding | str
    passed_over: tuple[Finding, ...] = ()
    final: bool = False
    again: bool = False  # ask again at once: what was doubted is no fault of this attempt


class LegacySource:
    """A Source over HTTP and a folder of ``req_<n>/``. ``attribution`` is known after ``describe``."""

    trouble = ""

    def __init__(self, spec: ExtractSpec, wait_s: float = WAIT_S) -> None:
        if spec.source.replicas:
            raise UsageError(
                "several servers with dump_mode counter",
                "their dumps carry no request id",
                "give each server a run of its own, with rows A:B",
            )
        self.attribution = "count"
        self.api = Api(spec.source.url, spec.source.api_key_env, spec.source.timeout_s, 3)
        self.folder = LegacyFolder(Path(spec.source.dump_dir))
        self._spec, self._wait_s = spec, wait_s
        self._chunk = 0
        self._layers: tuple[int, ...] = spec.target.taps
        self._seen: Scan | None = None
        self._top = -1
        self._done = False
        self._owed: dict[int, tuple[int, float]] = {}  # row -> its tokens, until when
        self._settle_s = _SETTLE_S
        self._others = False
        self._told: dict[Cause, int] = {}
        self._pruned = time.monotonic()

    async def describe(self) -> SourceFacts:
        """The server's settings, and how its dumps can be attributed: a request of a few tokens is sent to
        see."""
        info = await self.api.get("/server_info")
        facts = read_facts(info)
        size = info.get("chunked_prefill_size")
        self._chunk = size if isinstance(size, int) and size > 0 else 0
        self._layers = facts.layers or self._spec.target.taps
        problems = [*facts.problems, *await self._probe()]
        flags = {**facts.flags, "attribution": self.attribution}
        told = {self._spec.source.url: info}
        return dataclasses.replace(facts, flags=flags, problems=tuple(problems), infos=told)

    async def _probe(self) -> list[str]:
        """What speaks against the folder; sets the attribution."""
        try:
            await asyncio.to_thread(self.folder.hold)
            before = await asyncio.to_thread(self._scan)
            response = await self.api.generate(_body(rid(self._spec.run, 0, MAX_ATTEMPT), _PROBE))
        except FileNotFoundError:
            return [f"there is no dump folder {self.folder.path}: is dump_dir right?"]
        except (OSError, LegacyUnreadable) as error:
            return [f"the dump folder cannot be used: {error}"]
        except httpx.HTTPError as error:
            return [f"a request of {len(_PROBE)} tokens failed: {error or type(error).__name__}"]
        if response.status_code != 200:
            return [f"a request of {len(_PROBE)} tokens was answered with HTTP {response.status_code}"]
        deadline = time.monotonic() + self._wait_s
        window = await asyncio.to_thread(self._window, before, -1)
        while not any(p.tokens == len(_PROBE) for p in window.pieces) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            window = await asyncio.to_thread(self._window, before, -1)
        if not window.pieces:
            return [f"no dump came into {self.folder.path} after a request: is it the server's folder?"]
        if all(p.ids is not None for p in window.pieces):
            self.attribution = "token_ids"
        own = [p for p in window.pieces if p.tokens == len(_PROBE)]
        return await asyncio.to_thread(self._unfit, own[0]) if own else []

    def _unfit(self, piece: Piece) -> list[str]:
        """What a dump lacks that the run wants."""
        seen = (self._seen or {}).get(piece.number)
        if seen is None:
            return []  # overwritten meanwhile: the canary will see
        try:
            dump = self.folder.read(seen)
        except LegacyUnreadable as error:
            return [f"{seen.name} cannot be read: {error}"]
        self.folder.remove(seen)
        problems = []
        if tuple(dump.aux) not in (tuple(range(len(self._layers))), self._layers):
            problems.append(f"the dumps hold aux_<k> for k = {list(dump.aux)}, the taps are {self._layers}")
        want = self._spec.target.last
        if want == "pre":
            problems.append("the dumps hold no state before the final norm: set last = post, or none")
        elif want == "post" and dump.final is None:
            problems.append("the dumps hold no final state: set last = none")
        return problems

    async def ready(self) -> bool:
        """Whether the server would take a request now (GET /ready: nothing is generated)."""
        return await self.api.ready()

    async def clear(self, run: str) -> int:
        """Nothing: such a dump does not say whose it is. What is old goes while the run looks at the
        folder."""
        return 0

    def take(self, asks: AsyncIterator[Ask]) -> AsyncGenerator[Taken, None]:
        """Answer every ask, one at a time."""
        return answer_all(asks, self._ask, 1)

    async def _ask(self, ask: Ask) -> Taken:
        began = time.monotonic()
        passed: list[Finding] = []
        repeats = _REPEATS if ask.attempt >= _REPEATED_FROM else 1
        for sent in range(1, _REPEATS + 1):
            answer = await self._once(ask, sent)
            passed += answer.passed_over
            if not isinstance(answer.result, Finding) or answer.final or sent == _REPEATS:
                break
            if sent >= repeats and not answer.again:
                break
            passed.append(answer.result)
        seconds = time.monotonic() - began
        canary = ask.attempt >= _CANARY_FROM  # nobody tells what it passed over: it shall use up no example
        told = () if canary else tuple(f for f in passed if self._tell(f))
        if isinstance(answer.result, States):
            return Taken(ask, states=answer.result, request_s=seconds, passed_over=told)
        if isinstance(answer.result, Finding):
            return Taken(ask, finding=answer.result, request_s=seconds, passed_over=told, final=answer.final)
        self._top = -1  # the server may begin anew, and its counter with it
        return Taken(ask, lost=answer.result, request_s=seconds, passed_over=told)

    def _tell(self, finding: Finding) -> bool:
        """Beside a busy crowd every sample has a stranger's dump before its own: some examples will do."""
        self._told[finding.cause] = self._told.get(finding.cause, 0) + 1
        return self._told[finding.cause] <= _EXAMPLES

    async def _once(self, ask: Ask, sent: int) -> _Answer:
        ids = ask.sample.input_ids
        if self.attribution == "count" and 0 < self._chunk < len(ids):
            why = f"it comes in chunks of {self._chunk}, and without token ids they cannot be joined"
            evidence = {"chunked_prefill_size": self._chunk, "why": why}
            return _Answer(Finding(Cause.PARTIAL_CHUNK, self._chunk, len(ids), evidence), final=True)
        name = ask.rid if sent == 1 else f"{ask.rid[:-1]}.{sent}_"
        try:
            before, left = await asyncio.to_thread(self._before)
            floor = self._top
            reply = await self._send(name, ids)
            if reply is not None:
                return _Answer(reply)
            return await self._collect(ask, name, before, floor, left)
        except (OSError, LegacyUnreadable) as error:
            return _Answer(Finding(Cause.UNREADABLE, "the dump folder", None, {"why": str(error)[:200]}))

    async def _send(self, name: str, ids: tuple[int, ...]) -> Finding | str | None:
        """None when the request was answered as it should be."""
        try:
            response = await self.api.generate(_body(name, ids))
        except httpx.ReadTimeout:
            await self.api.abort(name)
            limit = self._spec.source.timeout_s
            if not await self.api.ready():
                return f"no answer within {limit:g} s, and the server is not ready"
            return Finding(Cause.LATE, None, len(ids), {"timeout_s": limit, "where": "the reply"})
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        if response.status_code != 200:
            return refusal(response, len(ids), self.api.url)
        try:
            meta: Mapping[str, Any] = response.json()["meta_info"]
            tokens, cached = int(meta.get("prompt_tokens", len(ids))), int(meta.get("cached_tokens") or 0)
            reason, answered = meta.get("finish_reason"), meta.get("id")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            text = response.text[:200]
            return Finding(Cause.UNREADABLE, "an answer that is not SGLang's", None, {"text": text})
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return f"the server aborted the request ({str(reason.get('message'))[:80]})"
        if answered != name:
            return Finding(Cause.FOREIGN, str(answered)[:80], name, {"where": "the reply"})
        if tokens != len(ids):
            return Finding(Cause.TRUNCATED_INPUT, tokens, len(ids), {"where": "the reply"})
        if cached:
            return Finding(Cause.PREFIX_CACHED, len(ids) - cached, len(ids), {"missing_prefix": cached})
        return None

    async def _collect(self, ask: Ask, name: str, before: Scan, floor: int, left: Piece | None) -> _Answer:
        """The dumps of an answered request, waited for."""
        ids, by_count = ask.sample.input_ids, self.attribution == "count"
        answered = time.monotonic()
        patience = self._wait_s + len(ids) / 1000
        landed: float | None = None
        while True:
            window = await asyncio.to_thread(self._window, before, floor, left, ask.sample.row)
            found = match(window, name, ids, by_count=by_count)
            waited = time.monotonic() - answered
            if found is None:
                landed = None
                if waited > patience:
                    break
            else:
                landed = waited if landed is None else landed
                if self._settled(window, found, waited, landed):
                    break
            if found is None and waited > _PARTS_S and parts(window, ids):
                break  # it came in pieces
            await asyncio.sleep(_POLL_S if waited < 1 else 5 * _POLL_S)
        chosen = found if isinstance(found, Match) else None
        passed = tuple(naive(window, ids, chosen))
        self._settle_debts(window, ask)
        self._others |= bool(window.gaps or window.landing or len(window.pieces) > 1)
        again = isinstance(found, Finding) and len(ids) in window.owed and found.cause is Cause.LATE
        if chosen is not None:
            self._settle_s = max(self._settle_s, landed or 0.0)
            if chosen.by == "count" and self._others:
                self._owed[ask.sample.row] = (len(ids), time.monotonic() + patience)
            result = await asyncio.to_thread(self._states, ask, chosen)
        else:
            assert not isinstance(found, Match)
            result = found or explain(window, ids, waited)
            passed = tuple(p for p in passed if p.cause is not result.cause)
            if found is None:  # it may still come, also where pieces seemed to be all
                self._owed[ask.sample.row] = (len(ids), math.inf)
            if window.pieces and all(p.number <= floor for p in window.pieces):
                self._top = -1  # only numbers that are used up: the server has begun anew
        await asyncio.to_thread(self._prune)
        return _Answer(result, passed, again=again)

    def _settled(self, window: Window, found: Match | Finding, waited: float, landed: float) -> bool:
        """Whether what was found ``landed`` s after the answer may be gone by, ``waited`` s after it."""
        if isinstance(found, Match) and found.by == "token_ids":
            return waited > _GAPS_S or not (window.gaps or window.landing)
        return waited > max(self._settle_s, landed + _SETTLE_S)

    def _settle_debts(self, window: Window, ask: Ask) -> None:
        """A dump that was owed to another sample is doubted once, however it turned out."""
        counts = {p.tokens for p in window.pieces}
        now = time.monotonic()
        self._owed = {
            row: (n, until)
            for row, (n, until) in self._owed.items()
            if row != ask.sample.row and n not in counts and now < until
        }

    # In a thread: files.

    def _scan(self) -> Scan:
        now = self.folder.scan()
        if self._seen is not None:
            self._top = max([self._top, *touched(self._seen, now)])
        self._seen = now
        return now

    def _before(self) -> tuple[Scan, Piece | None]:
        """What lies there when a request is sent, and the leftover in the folder of the next number."""
        now = self._scan()
        seen = now.get(self._top + 1) if self._top >= 0 else None
        return now, self._piece(seen, new=False) if seen is not None else None

    def _window(self, before: Scan, floor: int, left: Piece | None = None, row: int = -1) -> Window:
        """What is new since ``before``."""
        now = self._scan()
        pieces, landing = [], []
        for seen in changed(before, now):
            piece = self._piece(seen)
            if piece is None:
                landing.append(seen.number)
            else:
                pieces.append(piece)
        owed = frozenset(n for r, (n, _) in self._owed.items() if r != row)
        return Window(tuple(pieces), tuple(landing), floor, left, owed)

    def _piece(self, seen: Seen, *, new: bool = True) -> Piece | None:
        """A whole dump; None while it is not whole. Whole: ``done`` is there, or, from servers that write
        none, its files have not changed for a moment and say what they are."""
        marked = DONE in seen.files
        self._done |= marked and new  # an older patch may have written the leftovers
        if not marked and (self._done or time.time_ns() - seen.newest_ns < 1e9 * _GAPS_S):
            return None
        try:
            meta = self.folder.meta(seen)
        except LegacyUnreadable:
            return None
        return Piece(seen.number, meta.num_tokens, meta.mode, meta.input_ids, meta.rid)

    def _states(self, ask: Ask, chosen: Match) -> States | Finding:
        """Read the matched dumps, put them together, remove them."""
        seen = [self._seen[p.number] for p in chosen.pieces if self._seen and p.number in self._seen]
        names = [p.name for p in chosen.pieces]
        try:
            dumps = [self.folder.read(s) for s in seen]
        except LegacyUnreadable as error:
            return Finding(Cause.UNREADABLE, names[0], None, {"why": str(error)[:200], "folders": names})
        if len(dumps) != len(names):
            return Finding(Cause.UNREADABLE, names[0], None, {"why": "it is gone", "folders": names})
        states = build_states(ask, chosen, dumps, self._layers)
        if isinstance(states, States):
            for one in seen:
                self.folder.remove(one)
        return states

    def _prune(self) -> None:
        if time.monotonic() - self._pruned < 5 or self._seen is None:
            return
        self._pruned = time.monotonic()
        self.folder.prune(self._seen)

    async def aclose(self) -> None:
        """Close the connections, let the folder go."""
        self.folder.release()
        await self.api.aclose()


def build_states(
    ask: Ask, chosen: Match, dumps: list[LegacyDump], layers: tuple[int, ...]
) -> States | Finding:
    """Dumps that are the request's -> its states. ``layers``: what the server captures, in its order."""
    import torch

    ids = ask.sample.input_ids
    for dump in dumps:
        numbers = tuple(dump.aux)
        if numbers not in (tuple(range(len(layers))), layers):
            return Finding(Cause.WRONG_LAYERS, list(numbers), list(layers), {"where": "the names aux_<k>"})
    tensors = [list(d.aux.values()) for d in dumps]
    if len({(t.dtype, t.shape[1]) for taps in tensors for t in taps}) != 1:
        return Finding(Cause.WRONG_WIDTH, "taps of several widths or types", "one", {})
    finals = [d.final for d in dumps if d.final is not None]
    last = torch.cat(finals) if len(finals) == len(dumps) else None
    seen = ids if chosen.by == "count" else [t for p in chosen.pieces for t in (p.ids or ())]
    starts = [sum(p.tokens for p in chosen.pieces[:i]) for i in range(len(chosen.pieces))]
    return States(
        rid=ask.rid,
        input_ids=torch.tensor(list(seen), dtype=torch.int64),
        aux=torch.cat([torch.cat(taps, dim=1) for taps in tensors]),
        last=last,
        pre=None,
        num_tokens=sum(d.meta.num_tokens for d in dumps),
        layers=layers,
        chunks=tuple(
            {"start": s, "n": p.tokens, "folder": p.name} for s, p in zip(starts, chosen.pieces, strict=True)
        ),
        facts={"attribution": chosen.by, "folders": ", ".join(p.name for p in chosen.pieces)},
    )


def _body(name: str, ids: tuple[int, ...]) -> dict[str, Any]:
    return {
        "rid": name,
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "extra_key": name,  # a prefix cache never answers for another request
        "stream": False,
    }
