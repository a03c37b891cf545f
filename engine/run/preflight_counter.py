"""Preflight of counter-numbered dumps: which attribution is possible, and what it makes mandatory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.capture.states import Finding
from engine.run.checklist import Check, error, info
from engine.wire.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.dataset.samples import Counted
    from engine.sources.protocol import SourceFacts
    from engine.wire.spec import ExtractSpec


def counter_checks(spec: ExtractSpec, source: SourceFacts, counted: Counted) -> list[Check]:
    """Attribution, canary and chunks. No handshake and no beacon is expected from such a server."""
    by_count = source.flags.get("attribution") != "token_ids"
    return [
        _attribution(by_count),
        _canary(spec, by_count),
        _chunks(source, counted, by_count),
        _parts(spec, source),
    ]


def _attribution(by_count: bool) -> Check:
    if not by_count:
        return Check("attribution", True, "by token ids: the dumps carry the ids that the forward saw")
    detail = (
        "by count: the dumps carry no token ids, so a dump is matched by its number of tokens after the "
        "answer, one request at a time; content evidence and the canary decide"
    )
    return Check("attribution", True, detail)


def _canary(spec: ExtractSpec, by_count: bool) -> Check:
    ok = spec.canary > 0 or not by_count
    detail = f"{spec.canary} samples are taken twice and compared before the run"
    if not ok:
        detail = "the run has canary = 0, and attribution by count needs the canary"
    return Check("canary is mandatory" if by_count else "canary", ok, detail, "set canary = 3 or more")


def _parts(spec: ExtractSpec, source: SourceFacts) -> Check:
    """A dump holds the tokens of one forward. Of a prompt whose head was cached, or that was cut, that is a
    part with another context, and neither its ids nor its number of tokens say so. The win rate may pass it:
    such rows do predict these tokens. Recomputing the lowest tap from the ids alone does not."""
    name, size = "parts of others' prompts", source.flags.get("chunked_prefill_size")
    found = []
    if source.flags.get("disable_radix_cache") is not True:
        found.append("the prefix cache is on (our own extra_key does not keep others from sharing theirs)")
    if not isinstance(size, int) or isinstance(size, bool):
        found.append("the server does not say its chunk")
    elif size > 0:
        found.append(f"prompts are cut into chunks of {size} tokens")
    if not found:
        return info(name, "a dump holds a whole prompt: the prefix cache is off, and prompts are not cut")
    what = "; ".join(found)
    if spec.evidence == "recompute":
        return info(
            name, f"{what}: a dump may hold a part of a stranger's prompt, the recomputed tap decides"
        )
    effect = "a stranger's rows with the same tokens could pass, computed behind another beginning"
    step = (
        "start the server with --disable-radix-cache --chunked-prefill-size -1, or set evidence = recompute"
    )
    return error(name, f"{what}, and the evidence is {spec.evidence}", effect, step)


def unjoinable(source: SourceFacts, n_tokens: Mapping[int, int]) -> dict[int, Finding]:
    """The rows that come in chunks which nothing proves to belong together, each with its finding."""
    size = source.flags.get("chunked_prefill_size")
    if source.flags.get("attribution") != "count" or not isinstance(size, int) or size <= 0:
        return {}
    why = f"it comes in chunks of {size}, and without token ids they cannot be joined"
    evidence = {"chunked_prefill_size": size, "why": why}
    return {r: Finding(Cause.PARTIAL_CHUNK, size, n, evidence) for r, n in n_tokens.items() if n > size}


def _chunks(source: SourceFacts, counted: Counted, by_count: bool) -> Check:
    """Rows longer than a chunk are no reason to refuse: each is joined by its ids, or set aside by name."""
    size = source.flags.get("chunked_prefill_size")
    if not isinstance(size, int) or size <= 0:
        return Check("chunks", True, "the server does not cut prompts into chunks")
    over = [r for r, n in counted.n_tokens.items() if n > size]
    if not over:
        return Check("chunks", True, f"no row is longer than the server's chunk of {size} tokens")
    shown = ", ".join(f"{r} ({counted.n_tokens[r]})" for r in over[:5]) + (" ..." if len(over) > 5 else "")
    what = "cannot be joined without token ids and will be quarantined" if by_count else "are joined by ids"
    return Check(
        "chunks", True, f"{len(over)} rows are longer than the chunk of {size}: {shown}; they {what}"
    )
