"""States taken from mixed, chunked batches equal those of a lone forward of transformers."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from engine.demo.batching import BatchRules, plan
from engine.demo.requests import Request, Sampling
from tests.demo.harness import TAPS, compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.demo.harness import Bench, Lone

LENGTHS = (1, 2, 8, 33, 63, 64, 65, 100, 257, 400)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids with a shared beginning."""
    dice = random.Random(seed)
    return ([1, 9690, 198, 2683, 359] + [dice.randrange(100, 49000) for _ in range(length)])[:length]


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alternating"])
def test_every_state_equals_a_lone_forward(bench: Callable[..., Bench], lone: Lone, mixed: bool) -> None:
    b = bench(chunk=64, mixed=mixed)
    foreign = [b.submit(f"foreign-{i}", prompt(100 + i, 20 + 7 * i), new=12) for i in range(6)]
    prompts = {f"hsx-run-{i:08d}-01_": prompt(i, n) for i, n in enumerate(LENGTHS)}
    ours = {rid: b.submit(rid, ids, new=1 + i % 3) for i, (rid, ids) in enumerate(prompts.items())}
    late = [b.submit(f"late-{i}", prompt(200 + i, 30), new=5) for i in range(4)]
    for i, answer in enumerate([*foreign, *late]):
        request = answer.get()
        assert "hsx" not in request.meta_info()
        if i in (0, 3, 7):
            assert request.output == lone.greedy(request.prompt, request.sampling.max_new_tokens)
    for rid, ids in prompts.items():
        request = ours[rid].get()
        meta = request.meta_info()
        assert meta["cached_tokens"] == 0 and meta["prompt_tokens"] == len(ids)
        assert request.output[:1] == lone.greedy(ids, 1)
        dump = b.dump(rid)
        assert dump.meta.ok, dump.meta.error
        assert dump.meta.ids_checked and dump.meta.taps == TAPS
        assert dump.input_ids.tolist() == ids
        assert meta["hsx"] == {
            "path": str(b.folder / f"{rid}.safetensors"), "num_tokens": len(ids),
            "dump_id": dump.meta.dump_id, "taps": list(TAPS), "engine_layer_ids": list(TAPS),
        }  # fmt: skip
        result = compare(dump, lone.states(ids))
        assert result.cosine >= 0.999999 and result.error <= 1e-4, (rid, result)
    traffic = b.counts.traffic()
    assert traffic["ours"] == len(LENGTHS) and traffic["foreign"] == 10
    assert traffic["chunks"] > len(LENGTHS) and traffic["largest_batch"] >= 4
    assert traffic["shared_forwards"] >= len(LENGTHS) // 2
    chunks = b.dump("hsx-run-00000009-01_").meta.chunks
    assert len(chunks) >= 6 and [c.start for c in chunks] == sorted({c.start for c in chunks})
    if mixed:
        assert any(c.batch["mode"] == "mixed" for c in chunks)


def test_decode_steps_happen_between_prefills(bench: Callable[..., Bench]) -> None:
    b = bench(chunk=32, mixed=False)
    talker = b.submit("talker", prompt(1, 10), new=6)
    long = b.submit("hsx-run-00000001-01_", prompt(2, 400))
    assert talker.get().ended < long.get().ended
    forwards = [c.batch["forward"] for c in b.dump("hsx-run-00000001-01_").meta.chunks]
    assert max(later - earlier for earlier, later in itertools.pairwise(forwards)) == 2


def test_a_forward_keeps_to_its_budget_and_to_the_order_of_arrival() -> None:
    def request(serial: int, length: int, computed: int) -> Request:
        ids = list(range(length))
        return Request(f"r{serial}", serial, ids, Sampling(4), lambda r: None, computed=computed)

    running = [request(1, 50, 20), request(2, 10, 10), request(3, 40, 0), request(4, 5, 0)]
    running[1].output.append(7)
    segments = plan(running, BatchRules(chunk=64), after_prefill=True)
    assert [(s.request.serial, s.start, s.rows, s.prefill) for s in segments] == [
        (1, 20, 30, True), (3, 0, 33, True), (2, 10, 1, False),
    ]  # fmt: skip
    assert sum(s.rows for s in segments) == 64
    apart = BatchRules(chunk=64, mixed=False)
    assert [s.prefill for s in plan(running, apart, after_prefill=True)] == [False]
    assert [s.rows for s in plan(running, apart, after_prefill=False)] == [30, 34]


def test_sampling_with_a_seed_repeats_itself_and_differs_from_greedy(bench: Callable[..., Bench]) -> None:
    b = bench()
    ids = prompt(5, 20)
    how: dict[str, Any] = {"new": 12, "temperature": 1.5, "top_k": 50, "top_p": 0.95}
    first = b.submit("a", ids, seed=7, **how).get().output
    assert first == b.submit("b", ids, seed=7, **how).get().output
    assert first != b.submit("c", ids, new=12).get().output
    assert first != b.submit("d", ids, seed=8, **how).get().output


def test_an_answer_ends_at_a_stop_token(bench: Callable[..., Bench]) -> None:
    b = bench()
    ids = prompt(6, 20)
    free = b.submit("a", ids, new=8).get().output
    request = b.submit("b", ids, new=8, stop_token_ids=(free[2],)).get()
    assert request.output == free[: free.index(free[2]) + 1]
    assert request.finish == {"type": "stop", "matched": free[2]}
    nothing = b.submit("hsx-run-00000001-01_", ids, new=0).get()
    assert nothing.output == [] and nothing.finish == {"type": "length", "length": 0}
    assert b.dump("hsx-run-00000001-01_").meta.ok
