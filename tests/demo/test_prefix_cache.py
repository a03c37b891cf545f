"""The prefix cache: what it does to a capture, and what keeps it away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.demo.prefix_cache import PrefixCache
from engine.demo.requests import Request, Sampling
from tests.demo.harness import compare
from tests.demo.test_states import prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.demo.packed import PackedModel
    from tests.demo.harness import Bench, Lone


def test_a_hit_marks_the_dump_and_an_extra_key_avoids_it(bench: Callable[..., Bench], lone: Lone) -> None:
    b = bench(cache=True)
    ids = prompt(1, 100)
    first = b.submit("hsx-run-00000001-01_", ids).get()
    assert first.cached == 0 and b.dump("hsx-run-00000001-01_").meta.ok
    again = b.submit("hsx-run-00000002-01_", [*ids[:80], 7, 8, 9]).get()
    assert again.meta_info()["cached_tokens"] == 80
    assert again.output == lone.greedy(again.prompt, 1)
    dump = b.dump("hsx-run-00000002-01_")
    assert not dump.meta.ok and dump.aux is None
    assert "prefix cache" in dump.meta.error and "80 rows are missing" in dump.meta.error
    assert dump.meta.chunks[0].start == 80
    alone = b.submit("hsx-run-00000003-01_", ids, extra_key="hsx-run-00000003-01_").get()
    assert alone.cached == 0
    result = compare(b.dump("hsx-run-00000003-01_"), lone.states(ids))
    assert result.cosine >= 0.999999
    assert b.scheduler.flush()
    assert b.submit("hsx-run-00000004-01_", ids).get().cached == 0
    assert b.submit("foreign", ids).get().cached == len(ids) - 1, "one token is always computed"


def test_the_cache_holds_no_more_than_its_capacity(packed: PackedModel) -> None:
    cache = PrefixCache(capacity=25)

    def request(ids: list[int]) -> Request:
        made = Request("r", 1, ids, Sampling(1), lambda r: None, kv=packed.new_kv(len(ids) + 1))
        assert made.kv is not None
        made.kv.fill_(ids[0])
        made.computed = len(ids)
        return made

    for start in (10, 20, 30):
        cache.keep(request([start] * 10))
        assert cache.tokens <= 25
    late = request([10] * 10)
    assert cache.fill(late) == 0, "the oldest had to go"
    hit = request([30] * 10)
    assert hit.kv is not None
    hit.kv.zero_()
    assert cache.fill(hit) == 9
    assert torch.equal(hit.kv[:, :, :, :9], torch.full_like(hit.kv[:, :, :, :9], 30.0))
    cache.keep(request([40] * 26))
    assert cache.fill(request([40] * 26)) == 0, "longer than the whole cache"
