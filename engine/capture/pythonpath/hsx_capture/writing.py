"""From a finished prefill to a dump: waits for the copies, joins them, checks ids and norm. On the writer
thread.

Loaded inside production servers: torch late, relative imports only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dumpfile import Dump, DumpMeta, ids_sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .joining import Partial
    from .recorder import CaptureFacts

NORM_TOLERANCE = {"torch.float32": 1e-4, "torch.bfloat16": 2e-2, "torch.float16": 4e-3}
"""How far norm(pre) may be from last, relative to last's greatest value: rounding of the type, nothing
more."""


@dataclass(frozen=True)
class Finished:
    """A request whose prefill is complete (or refused), with the id of its dump."""

    partial: Partial
    dump_id: str


def build_dump(
    job: Finished, facts: CaptureFacts, norm: Callable[[torch.Tensor], torch.Tensor] | None
) -> Dump:
    """The dump of a finished request; not ok when a chunk is missing, ids differ or the norm does not fit."""
    import torch

    partial = job.partial
    ids = torch.tensor(list(partial.prompt), dtype=torch.int64)
    joined: dict[str, torch.Tensor] = {}
    error = partial.error
    if not error:
        for rows in partial.parts:
            rows.wait()
        joined = _join(partial)
        error = _short(joined, len(ids)) or _other_ids(joined.get("seen"), ids) or _norm_differs(joined, norm)
    seen = joined.pop("seen", None)
    meta = DumpMeta(
        rid=partial.rid, num_tokens=len(ids), ids_sha256=ids_sha256(partial.prompt), taps=facts.taps,
        engine_layer_ids=facts.engine_layer_ids, model=facts.model, chunks=tuple(partial.chunks),
        where={**facts.where, "dump_id": job.dump_id}, ok=not error, error=error, ids_checked=seen is not
        None, producer=facts.producer,
    )  # fmt: skip
    return Dump(meta, ids) if error else Dump(meta, ids, joined["aux"], joined.get("last"), joined.get("pre"))


def _join(partial: Partial) -> dict[str, torch.Tensor]:
    import torch

    names = set.intersection(*(set(p.tensors) for p in partial.parts))
    return {n: torch.cat([p.tensors[n] for p in partial.parts]).contiguous() for n in names}


def _short(joined: dict[str, torch.Tensor], total: int) -> str:
    wrong = {name: int(t.shape[0]) for name, t in joined.items() if t.shape[0] != total}
    return f"rows differ from the {total} tokens of the prompt: {wrong}" if wrong else ""


def _other_ids(seen: torch.Tensor | None, ids: torch.Tensor) -> str:
    if seen is None:
        return ""
    different = (seen.to(ids.dtype) != ids).nonzero()
    if different.numel() == 0:
        return ""
    at = int(different[0])
    return (
        f"the forward saw other token ids: {int(seen[at])} instead of {int(ids[at])} at position {at}, "
        f"{different.shape[0]} of {len(ids)} differ"
    )


def _norm_differs(
    joined: dict[str, torch.Tensor], norm: Callable[[torch.Tensor], torch.Tensor] | None
) -> str:
    import torch

    if norm is None or "pre" not in joined or "last" not in joined:
        return ""
    last = joined["last"]
    with torch.inference_mode():
        off = (norm(joined["pre"]).float() - last.float()).abs().max() / last.float().abs().max().clamp_min(
            1e-30
        )
    tolerance = NORM_TOLERANCE.get(str(last.dtype), 2e-2)
    # Written so that NaN does not pass.
    if off <= tolerance:
        return ""
    return f"the final norm of pre is not last: they differ by {float(off):.2e} of its greatest value"
