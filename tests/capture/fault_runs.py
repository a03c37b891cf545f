"""The runs of the fault matrix: real extraction jobs against the real small server, through a damaging proxy.

Almost all cases go through one job: source, reading, every check, store and quarantine are the ones of
production. What it cannot show has a run of its own.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from engine.dataset.samples import Samples
from engine.dataset.tokens import Tokens
from engine.run.check import verify
from engine.store.store import read_index
from engine.targets.lone import LoneForward
from engine.wire.errors import DatasetError, PreflightError
from engine.wire.ids import rid
from tests.capture import faults_files, faults_states
from tests.capture.fault_plan import ELDER_TOKENS, Plan, draw, tokens
from tests.capture.fault_proxy import Proxy, running
from tests.capture.faults import EARLY, HTTP, PEERS, RETAKE, SLOW, WIN_RATE, Fault, Scene
from tests.run.conftest import Bench, write_rows

if TYPE_CHECKING:
    from pathlib import Path

    from engine.capture.pythonpath.hsx_capture.dumpfile import Dump
    from tests.demo.harness import Server

EACH, GOOD, SEED = 30, 640, 3
FEW = 12
"""Cases of a fault that costs a timeout or a lone take each."""


def _not_here(scene: Scene) -> None:
    raise AssertionError("no dump is ever asked for")


MASKS = (
    Fault(
        "all-zero loss mask", frozenset(), _not_here, "all-zero loss mask", run=EARLY,
        refusal="preflight: loss mask",
    ),
    Fault(
        "loss mask shorter or longer than the ids", frozenset(), _not_here, "loss mask shorter", run=EARLY,
        refusal="bad row",
    ),
)  # fmt: skip

FAULTS = tuple(
    sorted(
        (*faults_files.FAULTS, *faults_states.FAULTS, *MASKS),
        key=lambda f: list(PEERS).index(f.peers) if f.peers else len(PEERS),
    )
)
"""All, the rows of the peers' matrix first."""


@dataclass
class Seen:
    """What became of the cases of one fault: how many, how many refused, and by which name."""

    cases: int = 0
    refused: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def add(self, name: str | None) -> None:
        """One case; ``name``: of the refusal, None: it was taken for good."""
        self.cases += 1
        if name is not None:
            self.refused += 1
            self.names[name] += 1


@dataclass
class Results:
    """By fault (its name), and the good cases with the names of what refused them wrongly."""

    faults: dict[str, Seen] = field(default_factory=lambda: {f.name: Seen() for f in FAULTS})
    good: Seen = field(default_factory=Seen)
    win_rate_good: Seen = field(default_factory=Seen)
    verified: int = 0
    canary: str = ""
    http_cases: int = 0

    @property
    def cases(self) -> int:
        """All randomised cases, the good ones included."""
        return sum(s.cases for s in self.faults.values()) + self.good.cases + self.win_rate_good.cases

    def wrong(self) -> list[str]:
        """Every fault that was not always refused under a right name."""
        out = []
        for fault in FAULTS:
            seen, right = self.faults[fault.name], {c.value for c in fault.causes} or {fault.refusal}
            if not seen.cases or seen.refused < seen.cases or not set(seen.names) <= right:
                out.append(
                    f"{fault.name}: {seen.refused}/{seen.cases} {dict(seen.names)}, right is {sorted(right)}"
                )
        return out


def run_matrix(place: Path, model: Path, server: Server) -> Results:
    """All runs, into new folders of ``place``."""
    return Matrix(place, model, server).run()


class Matrix:
    """One run after the other; the real dumps of one are the material of the next."""

    def __init__(self, place: Path, model: Path, server: Server) -> None:
        self.place, self.model, self.server = place, model, server
        self.lone = LoneForward(str(model))
        self.rng = random.Random(SEED)
        self.results = Results()
        self.strangers = self._strangers()

    def run(self) -> Results:
        """All of them."""
        self._main()
        self._slow()
        self._retake()
        self._win_rate()
        self._canary()
        self._masks()
        return self.results

    def _strangers(self) -> list[Dump]:
        out = []
        for i in range(8):
            name = rid("other", i, 1)
            self.server.generate(name, list(tokens(self.rng, ELDER_TOKENS, 9_000 + i)))
            out.append(self.server.dump(name))
        return out

    def _job(self, name: str, plan: Plan, proxy: Proxy, **spec: Any) -> dict[int, str | None]:
        """Run it; by row: the cause of its first mismatch, or None: it is in the store."""
        place = self.place / name
        place.mkdir()
        with running(proxy) as url:
            bench = Bench(place, replace(self.server, url=url), self.model)
            dataset = write_rows(place / "d.jsonl", plan.rows)
            source = spec.pop("source", {})
            made = bench.make_spec(
                dataset, run=name, attempts=1, source=source, **{"retake_every": 0, "canary": 3, **spec}
            )
            result = bench.run(made)
        assert (result.outcome, result.pending) == ("complete", 0)
        assert proxy.injected == set(plan.faults)
        done, _ = read_index(bench.store)
        refused = {e["row"]: str(e["cause"]) for e in bench.of("mismatch")}
        assert set(done) | set(refused) == set(range(len(plan.ids)))
        self.results.http_cases += len(plan.ids)
        return {row: None if row in done else refused[row] for row in range(len(plan.ids))}

    def _count(self, plan: Plan, outcome: dict[int, str | None], good: Seen) -> None:
        for row, name in outcome.items():
            fault = plan.faults.get(row)
            (good if fault is None else self.results.faults[fault.name]).add(name)

    def _proxy(self, plan: Plan, **changes: Any) -> Proxy:
        return Proxy(
            self.server.url,
            self.server.folder,
            plan.faults,
            SEED,
            self.strangers,
            plan.elders,
            self.lone,
            **changes,
        )

    def _main(self) -> None:
        plan = draw([f for f in FAULTS if f.run == HTTP], EACH, GOOD, SEED)
        proxy = self._proxy(plan)
        self._count(plan, self._job("m-main", plan, proxy, concurrency=12), self.results.good)
        report, verified = verify(self.place / "m-main" / "store", recompute=0)
        assert not report.bad
        assert verified is not None
        assert verified["samples"] == self.results.good.cases - self.results.good.refused
        self.results.verified = verified["samples"]

    def _slow(self) -> None:
        plan = draw([f for f in FAULTS if f.run == SLOW], FEW, FEW, SEED + 1)
        proxy = self._proxy(plan, blocks=False)
        with patch("engine.sources.endpoint._FILE_WAIT_S", 1.0):  # 20 s each otherwise
            outcome = self._job("m-slow", plan, proxy, canary=0, source={"timeout_s": 5.0})
        self._count(plan, outcome, self.results.good)

    def _retake(self) -> None:
        plan = draw([f for f in FAULTS if f.run == RETAKE], 2 * FEW, FEW, SEED + 2)
        outcome = self._job("m-retake", plan, self._proxy(plan, blocks=False), canary=0, retake_every=1)
        self._count(plan, outcome, self.results.good)

    def _win_rate(self) -> None:
        """Rows of 1 to 40 tokens, all right; then as many again, each with the states of its like."""
        (fault,) = (f for f in FAULTS if f.run == WIN_RATE)
        ids = [tokens(self.rng, n % 40 + 1, n) for n in range(80)]
        plan = Plan(tuple(ids), dict.fromkeys(range(40, 80), fault), range(40))
        outcome = self._job("m-win", plan, self._proxy(plan, blocks=False), canary=0, evidence="win_rate")
        self._count(plan, outcome, self.results.win_rate_good)

    def _canary(self) -> None:
        """A fault that one sample cannot show, in company only: the canary refuses the run."""
        (fault, *_) = (f for f in FAULTS if f.run == RETAKE)
        ids = tuple(tokens(self.rng, 20 + n, n) for n in range(4))
        plan = Plan(ids, dict.fromkeys(range(4), fault), range(0))
        try:
            self._job("m-canary", plan, self._proxy(plan, blocks=False, attempts=frozenset({90})))
        except PreflightError as error:
            self.results.canary = error.what

    def _masks(self) -> None:
        """Loss masks are the dataset's: refused before anything is asked for."""
        zero, length = (self.results.faults[f.name] for f in MASKS)
        for case in range(3):
            place = self.place / f"m-mask-{case}"
            place.mkdir()
            rows = [
                {"input_ids": list(tokens(self.rng, 9, n)), "loss_mask": [0, 1] + [1] * 7} for n in range(4)
            ]
            rows[self.rng.randrange(4)]["loss_mask"] = [0] * 9
            bench = Bench(place, self.server, self.model)
            zero.add(_refusal(bench, write_rows(place / "d.jsonl", rows)))
        vocabulary = Tokens(str(self.model))
        for case in range(EACH):
            n = self.rng.randint(2, 60)
            wrong = self.rng.choice([m for m in range(2 * n) if m != n])
            row = {"input_ids": list(tokens(self.rng, n, case)), "loss_mask": [1] * wrong}
            path = self.place / f"mask-{case}.jsonl"
            path.write_text(json.dumps(row) + "\n")
            try:
                Samples(str(path), vocabulary).count()
                length.add(None)
            except DatasetError as error:
                length.add(error.what[:7])


def _refusal(bench: Bench, dataset: Path) -> str | None:
    try:
        bench.run(bench.make_spec(dataset))
    except PreflightError as error:
        return error.what
    return None
