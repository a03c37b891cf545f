"""Faults of everything but the numbers: the file, what it says of itself, its shapes, and the reply."""

from __future__ import annotations

import json
import os
import pickle
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from engine.capture.pythonpath.hsx_capture.dumpfile import Chunk, Dump, ids_sha256, write_error
from engine.demo.tiny import HIDDEN
from engine.wire.causes import Cause
from engine.wire.ids import parse_rid, rid
from tests.capture.faults import SLOW, STATES, Fault, Scene

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CACHED = 4


def cut(s: Scene, first: int, end: int, *, ids: bool = False, **meta: Any) -> None:
    """Only rows [first, end) of the states (``ids``: and of the ids) are in the file."""
    new: dict[str, Any] = {name: getattr(s.dump, name)[first:end] for name in STATES}
    if ids:
        new["input_ids"] = s.dump.input_ids[first:end]
        meta["ids_sha256"] = ids_sha256(s.ids[first:end])
    s.write(replace(s.dump, meta=replace(s.dump.meta, **meta), **new))


def cached_rows(s: Scene) -> None:
    """The first four were cached; the chunk list says so, ok does not."""
    cut(s, CACHED, s.n, chunks=(Chunk(CACHED, s.n - CACHED),))


def cached_silent(s: Scene) -> None:
    """The first four are missing, ids and rows, and nothing says so."""
    cut(s, CACHED, s.n, ids=True, num_tokens=s.n - CACHED, chunks=(Chunk(0, s.n - CACHED),))


def cached_marked(s: Scene) -> None:
    """As the recorder itself marks it."""
    error = f"prefix cache hit: the first {CACHED} of {s.n} rows were not computed for this request"
    chunks = (Chunk(CACHED, s.n - CACHED),)
    s.write(
        Dump(replace(s.dump.meta, ok=False, error=error, ids_checked=False, chunks=chunks), s.dump.input_ids)
    )


def chunk_lost(s: Scene) -> None:
    """Rows and list end after the first chunk."""
    k = s.rng.randrange(2, s.n)
    cut(s, 0, k, chunks=(Chunk(0, k),))


def chunk_silent(s: Scene) -> None:
    """Rows are missing at the end, and the list says that all are there."""
    cut(s, 0, s.rng.randrange(2, s.n))


def chunk_hole(s: Scene) -> None:
    """As many rows as tokens, but the chunks leave a hole and overlap."""
    k = s.n // 2
    s.says(chunks=(Chunk(0, k), Chunk(k + 1, s.n - k)))


def chunk_alone(s: Scene) -> None:
    """The second chunk by itself, ids and rows."""
    a, b = s.n // 3, 2 * s.n // 3
    cut(s, a, b, ids=True, chunks=(Chunk(a, b - a),))


def chunk_marked(s: Scene) -> None:
    """As the recorder itself marks it: nothing was joined, so no ids were compared."""
    a, b = s.n // 3, 2 * s.n // 3
    error = (
        f"lost chunk: a chunk starts at {b} but only {a} of {s.n} rows had arrived: {b - a} rows are missing"
    )
    chunks = (Chunk(0, a), Chunk(b, s.n - b))
    s.write(
        Dump(replace(s.dump.meta, ok=False, error=error, ids_checked=False, chunks=chunks), s.dump.input_ids)
    )


def ids_marked(s: Scene) -> None:
    """As the recorder itself marks it."""
    error = f"the forward saw other token ids: 7 instead of {s.ids[0]} at position 0, 1 of {s.n} differ"
    s.write(Dump(replace(s.dump.meta, ok=False, error=error), s.dump.input_ids))


def decode_step(s: Scene) -> None:
    """The row of a generated token."""
    new: dict[str, Any] = {name: getattr(s.dump, name)[-1:] for name in STATES}
    ids = torch.tensor([(s.ids[-1] + 1) % 40000])
    meta = replace(s.dump.meta, num_tokens=1, chunks=(Chunk(0, 1),), ids_sha256=ids_sha256(ids.tolist()))
    s.write(replace(s.dump, meta=meta, input_ids=ids, **new))


def decode_rows(s: Scene) -> None:
    """One row of states, all ids."""
    cut(s, s.n - 1, s.n, chunks=(Chunk(0, 1),))


def neighbour_too(s: Scene) -> None:
    """The cut goes on into the next request."""
    after = s.rng.choice(s.siblings)
    k = s.rng.randrange(1, 9)
    s.rows(lambda t, name: torch.cat([t, getattr(after, name)[:k]]))


def truncated(s: Scene) -> None:
    """The dump of a prompt that was cut short."""
    k = s.rng.randrange(2, s.n)
    cut(s, 0, k, ids=True, num_tokens=k, chunks=(Chunk(0, k),))


def other_ids(digest: bool) -> Callable[[Scene], None]:
    """The ids of another request in flight. ``digest``: that of the capture is not rewritten."""

    def inject(s: Scene) -> None:
        ids = s.sibling.input_ids[: s.n].clone()
        meta = s.dump.meta if digest else replace(s.dump.meta, ids_sha256=ids_sha256(ids.tolist()))
        s.write(replace(s.dump, meta=meta, input_ids=ids))

    return inject


def one_id(s: Scene) -> None:
    """One token is another."""
    ids = s.dump.input_ids.clone()
    i = s.rng.randrange(s.n)
    ids[i] = (int(ids[i]) + 1) % 40000
    s.write(replace(s.dump, meta=replace(s.dump.meta, ids_sha256=ids_sha256(ids.tolist())), input_ids=ids))


def whole_other(s: Scene) -> None:
    """A dump of another request under this request's id: its ids and its states."""
    other = s.rng.choice(s.siblings)
    mine = s.dump.meta
    s.write(replace(other, meta=replace(other.meta, rid=mine.rid, where=mine.where)))


def other_digest(s: Scene) -> None:
    """The states of another request, its ids rewritten to be right; the digest of the capture is its own."""
    other = s.sibling
    new: dict[str, Any] = {name: getattr(other, name)[: s.n] for name in STATES}
    s.write(replace(s.dump, meta=replace(s.dump.meta, ids_sha256=other.meta.ids_sha256), **new))


def leftover(s: Scene) -> None:
    """A file of an earlier attempt with the same request id."""
    s.says(where={**s.dump.meta.where, "dump_id": f"1-{s.rng.randrange(1, 10_000)}"})


def earlier_attempt(s: Scene) -> None:
    """The request id of another attempt at the row."""
    name = parse_rid(s.rid)
    assert name is not None
    s.says(rid=rid(name.run, name.row, 79))


def foreign_file(s: Scene) -> None:
    """Another client's file, as it is, under our name."""
    s.write(s.rng.choice(s.strangers))


def foreign_promised(s: Scene) -> None:
    """The same, and the reply promises that very dump."""
    other = s.rng.choice(s.strangers)
    s.meta["hsx"] = {**s.meta["hsx"], "dump_id": other.meta.dump_id}
    s.write(other)


def reply(**changes: Any) -> Callable[[Scene], None]:
    """Fields of meta_info."""
    return lambda s: s.meta.update(changes)


def shake(change: Callable[[Scene], dict[str, Any]]) -> Callable[[Scene], None]:
    """Fields of the handshake."""

    def inject(s: Scene) -> None:
        s.meta["hsx"] = {**s.meta["hsx"], **change(s)}

    return inject


def no_handshake(s: Scene) -> None:
    """As from a server without the plugin."""
    del s.meta["hsx"]


def error_reply(s: Scene) -> None:
    """The plugin refused at once."""
    s.meta["hsx"] = {"error": "no room: 12 bytes are free"}


def error_file(s: Scene) -> None:
    """The plugin failed later."""
    write_error(
        s.folder, s.rid, s.dump.meta.dump_id, "the dump was not written: OSError: No space left on device"
    )


def two_taps(said: bool) -> Callable[[Scene], None]:
    """The middle tap is not there. ``said``: and the dump says so."""

    def inject(s: Scene) -> None:
        assert s.dump.aux is not None
        aux = torch.cat([s.dump.aux[:, :HIDDEN], s.dump.aux[:, 2 * HIDDEN :]], -1)
        taps = (s.dump.meta.taps[0], s.dump.meta.taps[2]) if said else s.dump.meta.taps
        s.write(replace(s.dump, meta=replace(s.dump.meta, taps=taps), aux=aux))

    return inject


def shape(change: Callable[[Tensor], Tensor]) -> Callable[[Scene], None]:
    """aux in another shape."""

    def inject(s: Scene) -> None:
        assert s.dump.aux is not None
        s.write(replace(s.dump, aux=change(s.dump.aux)))

    return inject


def dtype(s: Scene) -> None:
    """All states in another dtype than the server's."""
    to = s.rng.choice((torch.bfloat16, torch.float16, torch.float64))
    s.rows(lambda t, name: t.to(to))


def without(*names: str) -> Callable[[Scene], None]:
    """Without these tensors."""

    def inject(s: Scene) -> None:
        tensors = {n: t.contiguous() for n, t in s.dump.tensors().items() if n not in names}
        s.put(save(tensors, metadata=s.dump.meta.to_strings()))

    return inject


def metadata(**changes: str) -> Callable[[Scene], None]:
    """Metadata strings."""

    def inject(s: Scene) -> None:
        tensors = {n: t.contiguous() for n, t in s.dump.tensors().items()}
        s.put(save(tensors, metadata={**s.dump.meta.to_strings(), **changes}))

    return inject


def no_metadata(s: Scene) -> None:
    """Another program's safetensors file."""
    s.put(save({n: t.contiguous() for n, t in s.dump.tensors().items()}))


def truncated_file(s: Scene) -> None:
    """Cut at random."""
    s.put(s.data[: s.rng.randrange(1, len(s.data))])


def pickled(s: Scene) -> None:
    """A pickle that would run a program, under the dump's name."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(s.folder / "pwned"),))

    s.put(pickle.dumps(Evil()))


def long_header(s: Scene) -> None:
    """A header that claims more than there is."""
    s.put(struct.pack("<Q", 1 << 40) + s.data[8:])


def bad_header(s: Scene) -> None:
    """A header that is no JSON."""
    (size,) = struct.unpack("<Q", s.data[:8])
    s.put(s.data[:8] + b"{" * size + s.data[8 + size :])


def linked(link: Callable[[str, str], None]) -> Callable[[Scene], None]:
    """The right bytes, but behind a link."""

    def inject(s: Scene) -> None:
        real = s.folder / f"real-{s.rid}"
        os.rename(s.path, real)
        link(str(real), str(s.path))

    return inject


def fifo(s: Scene) -> None:
    """A pipe that never ends."""
    s.path.unlink()
    os.mkfifo(s.path, 0o600)


def gone(s: Scene) -> None:
    """The promised file does not come."""
    s.path.unlink()


def not_sglang(s: Scene) -> None:
    """A reply of another shape."""
    s.reply.clear()
    s.reply["text"] = "hello"


def late(s: Scene) -> None:
    """The proxy holds the answer back for ever (fault_proxy.py)."""


def _set(*causes: Cause) -> frozenset[Cause]:
    return frozenset(causes)


C = Cause
ROWS, IDS = "rows missing", "ids of another request"
FAULTS = (
    Fault("first 4 rows cached, said by the chunks", _set(C.PREFIX_CACHED), cached_rows, ROWS, 6),
    Fault("first 4 rows and ids cached, not said", _set(C.PREFIX_CACHED), cached_silent, ROWS, 6),
    Fault("first 4 rows cached, marked by the writer", _set(C.PREFIX_CACHED), cached_marked, ROWS, 6),
    Fault("a chunk lost, said by the chunks", _set(C.PARTIAL_CHUNK), chunk_lost, ROWS, 4),
    Fault("rows missing at the end, not said", _set(C.PARTIAL_CHUNK), chunk_silent, ROWS, 4),
    Fault("chunks with a hole, all rows there", _set(C.PARTIAL_CHUNK), chunk_hole, least=4),
    Fault("one chunk of three alone", _set(C.PARTIAL_CHUNK), chunk_alone, ROWS, 6),
    Fault("a chunk lost, marked by the writer", _set(C.PARTIAL_CHUNK), chunk_marked, ROWS, 6),
    Fault("a decode step", _set(C.DECODE_STEP), decode_step, ROWS, 2),
    Fault("one row of states, all ids", _set(C.DECODE_STEP), decode_rows, ROWS, 2),
    Fault("rows of the next request behind", _set(C.NEIGHBOUR), neighbour_too),
    Fault("a prompt cut short by the server", _set(C.TRUNCATED_INPUT), truncated, ROWS, 4),
    Fault("the reply counts fewer tokens", _set(C.TRUNCATED_INPUT), reply(prompt_tokens=0)),
    Fault("ids of a request in flight", _set(C.IDS_DIFFER), other_ids(False), IDS, 3, True),
    Fault("the same, the capture's digest kept", _set(C.IDS_DIFFER), other_ids(True), IDS, 3, True),
    Fault("one token id changed", _set(C.IDS_DIFFER), one_id, IDS, 2),
    Fault("ids and states of a request in flight", _set(C.IDS_DIFFER), whole_other, IDS, 3, True),
    Fault("other ids seen, marked by the writer", _set(C.IDS_DIFFER), ids_marked, IDS),
    Fault(
        "states of another, digest kept, ids right",
        _set(C.IDS_DIFFER),
        other_digest,
        IDS,
        2,
        True,
    ),
    Fault("the reply counts cached tokens", _set(C.PREFIX_CACHED), reply(cached_tokens=1)),
    Fault("the handshake names other layers", _set(C.WRONG_LAYERS), shake(lambda s: {"taps": [1, 3, 5]})),
    Fault("a leftover with the same request id", _set(C.STALE), leftover),
    Fault("the request id of another attempt", _set(C.STALE), earlier_attempt),
    Fault("another client's file under our name", _set(C.FOREIGN), foreign_file),
    Fault("another client's file, promised", _set(C.FOREIGN), foreign_promised),
    Fault("the reply of another request", _set(C.FOREIGN), reply(id="hsx-other-00000001-01_")),
    Fault(
        "a path to another file",
        _set(C.FOREIGN),
        shake(lambda s: {"path": s.rng.choice(("/etc/passwd", "../x.safetensors", "", None))}),
    ),
    Fault("2 taps of 3, and it says so", _set(C.WRONG_LAYERS), two_taps(True), "2 aux layers instead of 3"),
    Fault("2 taps of 3, not said", _set(C.WRONG_WIDTH), two_taps(False), "2 aux layers instead of 3"),
    Fault(
        "other layers, said",
        _set(C.WRONG_LAYERS),
        lambda s: s.says(taps=tuple(t + 1 for t in s.dump.meta.taps)),
    ),
    Fault("no pre-norm state", _set(C.WRONG_LAYERS), without("pre"), "missing key"),
    Fault("no aux", _set(C.UNREADABLE), without("aux"), "missing key"),
    Fault("no input_ids", _set(C.UNREADABLE), without("input_ids"), "missing key"),
    Fault("aux with a leading 1", _set(C.WRONG_WIDTH), shape(lambda t: t[None])),
    Fault("aux transposed", _set(C.WRONG_WIDTH), shape(lambda t: t.T.contiguous())),
    Fault("bfloat16, float16 or float64 for float32", _set(C.WRONG_DTYPE), dtype, "wrong dtype"),
    Fault("file cut at random", _set(C.UNREADABLE), truncated_file, "truncated file"),
    Fault("file of no bytes", _set(C.UNREADABLE), lambda s: s.put(b""), "truncated file"),
    Fault("a pickle", _set(C.UNREADABLE), pickled),
    Fault("a newer format version", _set(C.UNREADABLE), metadata(format_version="2")),
    Fault("chunks that are no JSON", _set(C.UNREADABLE), metadata(chunks=json.dumps([1])[:-1])),
    Fault("no metadata", _set(C.UNREADABLE), no_metadata),
    Fault("a header beyond the file", _set(C.UNREADABLE), long_header),
    Fault("a header that is no JSON", _set(C.UNREADABLE), bad_header),
    Fault("a symlink", _set(C.UNREADABLE), linked(os.symlink)),
    Fault("a hard link", _set(C.UNREADABLE), linked(os.link)),
    Fault("a pipe", _set(C.UNREADABLE), fifo),
    Fault("a reply that is not SGLang's", _set(C.UNREADABLE), not_sglang),
    Fault("no handshake", _set(C.NO_HANDSHAKE), no_handshake),
    Fault("the plugin refuses in its reply", _set(C.WRITER_ERROR), error_reply),
    Fault("the plugin leaves an error file", _set(C.WRITER_ERROR), error_file),
    Fault("the promised file never comes", _set(C.MISSING), gone, run=SLOW),
    Fault("no answer within the timeout", _set(C.LATE), late, run=SLOW),
)
