"""Before anything is asked for: would this run fail, or produce wrong data? Every check is listed, passed
or not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.capture.evidence import TOLERANCE
from engine.capture.pythonpath.hsx_capture.beacon import read_beacons
from engine.wire.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.dataset.samples import Counted
    from engine.sources.protocol import SourceFacts
    from engine.targets.lowest import TargetFacts
    from engine.wire.spec import ExtractSpec

_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Check:
    """One check: what was looked at, whether it holds, what was found, what to do if it does not hold."""

    name: str
    ok: bool
    detail: str
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the preflight event."""
        return {"name": self.name, "ok": self.ok, "detail": self.detail, "next": self.next_step}


@dataclass(frozen=True)
class Estimate:
    """What the run will need: tokens and bytes of the store, bytes of /dev/shm at most at once."""

    samples: int
    tokens: int
    bytes: int
    free_bytes: int
    dump_bytes: int
    dump_free_bytes: int

    def to_json(self) -> dict[str, int]:
        """For the preflight event."""
        return dict(self.__dict__)


def estimate(
    spec: ExtractSpec, counted: Counted, pending: set[int], hidden_size: int, source_dtype: str
) -> Estimate:
    """Sizes from the dataset itself, no guess: (taps + last) x H x element size, ids and mask."""
    width = len(spec.target.taps) + (spec.target.last is not None)
    lengths = [counted.n_tokens[r] for r in pending]
    tokens = sum(lengths)
    per_token = width * hidden_size * _SIZE[spec.target.dtype] + 9
    dump_token = (len(spec.target.taps) + 2) * hidden_size * _SIZE.get(source_dtype, 4)
    at_once = sorted(lengths, reverse=True)[: spec.concurrency + 2]
    return Estimate(
        samples=len(lengths),
        tokens=tokens,
        bytes=tokens * per_token,
        free_bytes=_free(Path(spec.store)),
        dump_bytes=sum(at_once) * dump_token,
        dump_free_bytes=_free(Path(spec.source.dump_dir)),
    )


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    s = os.statvfs(path)
    return s.f_bavail * s.f_frsize


def run_checks(
    spec: ExtractSpec, target: TargetFacts, source: SourceFacts, counted: Counted, size: Estimate
) -> list[Check]:
    """All checks, in the order in which a person would want them."""
    return [
        _model(spec, source),
        _settings(source),
        _dtype(source),
        _layers(spec, source),
        _taps(spec, target),
        _lengths(spec, target, source, counted),
        _mask(counted),
        _disk(size),
        _dump_room(spec, size),
        *_how_dumps_are_known(spec, source, counted),
    ]


def _how_dumps_are_known(spec: ExtractSpec, source: SourceFacts, counted: Counted) -> list[Check]:
    if spec.source.dump_mode == "rid":
        return [_capture(spec)]
    from engine.run.preflight_counter import counter_checks

    return counter_checks(spec, source, counted)


def refuse_if_failed(checks: list[Check]) -> None:
    """PreflightError that names every failed check."""
    failed = [c for c in checks if not c.ok]
    if failed:
        raise PreflightError(
            f"preflight: {', '.join(c.name for c in failed)}",
            "; ".join(c.detail for c in failed),
            "; ".join(c.next_step for c in failed if c.next_step),
        )


def _model(spec: ExtractSpec, source: SourceFacts) -> Check:
    mine, theirs = spec.target.model.rstrip("/"), source.model.rstrip("/")
    same = mine == theirs or os.path.realpath(mine) == os.path.realpath(theirs)
    return Check(
        "model", same, f"the run wants {mine}, the server has {theirs}", "start the server with that model"
    )


def _settings(source: SourceFacts) -> Check:
    detail = "; ".join(source.problems) or f"SGLang {source.version or '?'}, dtype {source.dtype}"
    return Check(
        "server settings", not source.problems, detail, "restart the server with the capture's flags"
    )


def _dtype(source: SourceFacts) -> Check:
    ok = source.dtype in TOLERANCE
    detail = f"the server computes in {source.dtype or 'an unknown dtype'}"
    return Check("dtype", ok, detail, f"start the server with --dtype {' or '.join(TOLERANCE)}")


def _layers(spec: ExtractSpec, source: SourceFacts) -> Check:
    ok = source.layers is None or source.layers == spec.target.taps
    detail = f"taps {list(spec.target.taps)}, the server captures {list(source.layers or ())}"
    return Check("layers", ok, detail, "start the server with the run's taps (output of 0-based layer k)")


def _taps(spec: ExtractSpec, target: TargetFacts) -> Check:
    over = [t for t in spec.target.taps if t >= target.num_layers]
    detail = f"{target.architecture} has layers 0..{target.num_layers - 1}; taps {list(spec.target.taps)}"
    return Check("taps", not over, detail, "choose taps in that range")


def _lengths(spec: ExtractSpec, target: TargetFacts, source: SourceFacts, counted: Counted) -> Check:
    limits = {
        "max_tokens": spec.dataset.max_tokens,
        "the server's context less 1": source.context_length - 1,
        "the model's positions": target.max_positions,
    }
    name, limit = min(((n, v) for n, v in limits.items() if v > 0), key=lambda x: x[1])
    over = over_long(counted.n_tokens, limit)
    if not over or spec.dataset.over_long == "quarantine":
        row, longest = counted.longest
        return Check("lengths", True, f"longest is row {row} with {longest} tokens, limit {limit} ({name})")
    shown = ", ".join(f"{r} ({counted.n_tokens[r]})" for r in over[:5])
    return Check(
        "lengths",
        False,
        f"{len(over)} rows are longer than {limit} tokens ({name}): {shown}",
        "raise the limit, shorten them, or set over_long = quarantine",
    )


def length_limit(spec: ExtractSpec, target: TargetFacts, source: SourceFacts) -> int:
    """The longest row that can be taken, in tokens."""
    limits = (spec.dataset.max_tokens, source.context_length - 1, target.max_positions)
    return min(v for v in limits if v > 0)


def over_long(n_tokens: Mapping[int, int], limit: int) -> list[int]:
    """The rows beyond the limit."""
    return [r for r, n in n_tokens.items() if n > limit]


def _mask(counted: Counted) -> Check:
    empty = [r for r, n in counted.supervised.items() if n == 0]
    total = sum(counted.supervised.values())
    if not empty:
        return Check(
            "loss mask", True, f"{total} of {counted.total} tokens are supervised, every row has some"
        )
    return Check(
        "loss mask",
        False,
        f"{len(empty)} rows have no supervised token: {', '.join(map(str, empty[:10]))}",
        "they would train nothing: check the chat template's assistant turns, or remove them",
    )


def _disk(size: Estimate) -> Check:
    need = int(size.bytes * 1.05) + (64 << 20)
    detail = f"needs {size.bytes / 1e9:.2f} GB, {size.free_bytes / 1e9:.2f} GB are free"
    return Check("disk", need <= size.free_bytes, detail, "free space, or put the store elsewhere")


def _dump_room(spec: ExtractSpec, size: Estimate) -> Check:
    ok = size.dump_bytes * 2 <= size.dump_free_bytes
    need, free = size.dump_bytes / 1e9, size.dump_free_bytes / 1e9
    detail = f"{spec.source.dump_dir}: up to {need:.2f} GB at once, {free:.2f} GB free"
    return Check("dump folder", ok, detail, "lower the concurrency, or free /dev/shm")


def _capture(spec: ExtractSpec) -> Check:
    try:
        alive = read_beacons(Path(spec.source.dump_dir))
    except OSError as error:
        return Check(
            "capture", False, f"the dump folder cannot be used: {error}", "is the capture plugin loaded?"
        )
    detail = f"active in {len(alive)} process(es)" if alive else "no live process says that it captures"
    return Check("capture", bool(alive), detail, "start the server with the capture plugin")
