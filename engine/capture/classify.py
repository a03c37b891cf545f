"""From a dump as it was read to states, or to what speaks against it before any number is looked at. Pure.

A dump passes three judges, each with causes of its own (engine/wire/cause_table.py): this one reads what the
writer says; checks.py compares with the sample; evidence.py compares the numbers with a recomputation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.capture.checks import covered, ids_cause, rid_cause
from engine.capture.pythonpath.hsx_capture.dumpfile import ids_sha256
from engine.capture.states import Finding, States
from engine.wire.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.capture.pythonpath.hsx_capture.dumpfile import Dump, DumpMeta

OTHER_IDS, OTHER_NORM, SHORT_ROWS = "other token ids", "final norm", "rows differ"
"""What the writer's own errors say (hsx_capture/writing.py; a test binds them to the real ones)."""


def _are_ids(ids: Tensor) -> bool:
    """Whether a digest can be taken of them; what is wrong with others is said by checks.py."""
    return ids.dim() == 1 and str(ids.dtype) in ("torch.int64", "torch.int32")


def judge_dump(dump: Dump, rid: str, ids: Sequence[int], promised: str) -> States | Finding:
    """A dump -> its states; or why it is not to be looked at further.

    Args:
        rid, ids: the request's own.
        promised: the ``dump_id`` that the reply's handshake named.
    """
    meta = dump.meta
    whose = rid_cause(meta.rid, rid)
    if whose is Cause.FOREIGN:  # another dump id is then no news
        return Finding(whose, meta.rid[:200], rid, {"where": "the dump"})
    if meta.dump_id != promised:
        why = "the file is not the one that the reply promised"
        return Finding(Cause.STALE, meta.dump_id[:80], promised, {"why": why})
    if whose is not None:
        return Finding(whose, meta.rid[:200], rid, {"where": "the dump"})
    if not meta.ok:
        return _marked(dump, tuple(ids))
    if not meta.ids_checked:
        why = "the ids that the forward saw were not compared with the request's"
        return Finding(Cause.IDS_DIFFER, None, len(ids), {"why": why})
    if dump.aux is None:
        why = "it says ok, but has no states (aux)"
        return Finding(Cause.UNREADABLE, sorted(dump.tensors()), ["aux", "input_ids"], {"why": why})
    if _are_ids(dump.input_ids) and meta.ids_sha256 != ids_sha256(map(int, dump.input_ids.tolist())):
        why = "the digest that was taken at the capture is of other token ids than the file has"
        return Finding(Cause.IDS_DIFFER, meta.ids_sha256[:64], ids_sha256(ids), {"why": why})
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


def _marked(dump: Dump, ids: tuple[int, ...]) -> Finding:
    """What the writer itself says against its dump (``ok`` is false: there are no states)."""
    meta, n = dump.meta, len(ids)
    chunks = [c.to_json() for c in meta.chunks]
    why: dict[str, Any] = {"why": meta.error[:200], "chunks": chunks[:32]}
    rows, start = sum(c.rows for c in meta.chunks), meta.chunks[0].start if meta.chunks else 0
    if start > 0:
        return Finding(Cause.PREFIX_CACHED, rows, n, {**why, "missing_prefix": start})
    prompt = dump.input_ids.tolist() if dump.input_ids.dim() == 1 else []
    named = ids_cause(prompt, ids, meta.num_tokens, 0)
    if named is not None:
        return Finding(named[0], len(prompt), n, {**why, **named[1]})
    if OTHER_IDS in meta.error:
        return Finding(Cause.IDS_DIFFER, rows, n, why)
    if SHORT_ROWS in meta.error or (chunks and covered(chunks) != n):
        return Finding(Cause.PARTIAL_CHUNK, rows, n, {**why, "joined": covered(chunks)})
    if OTHER_NORM in meta.error:
        return Finding(_norm_cause(meta), rows, n, why)
    return Finding(Cause.WRITER_ERROR, rows, n, why)


def _norm_cause(meta: DumpMeta) -> Cause:
    """norm(pre) is not last: because there is a NaN, or because they are rows of different places."""
    return Cause.NON_FINITE if "nan" in meta.error or "inf " in meta.error else Cause.EVIDENCE_LOW
