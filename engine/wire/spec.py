"""What a run is asked to do: the ``extract`` part of spec.json, sent by the console, read by the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.wire.errors import SpecError

T = TypeVar("T")


@dataclass(frozen=True)
class DatasetSpec:
    """Which samples. ``rows`` is [first, last) or None for all; ``over_long`` says what a row beyond
    ``max_tokens`` means: "refuse" ends the preflight, "quarantine" sets the row aside."""

    path: str
    max_tokens: int = 8192
    over_long: str = "refuse"
    thinking: bool = False
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class TargetSpec:
    """Which states. ``taps``: outputs of 0-based decoder layers, ascending. ``dtype``: as stored."""

    model: str
    taps: tuple[int, ...]
    last: str | None = "pre"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Endpoint:
    """One server more of the same run: its address, its own dump folder, its log file on the host."""

    url: str
    dump_dir: str
    log: str | None = None


@dataclass(frozen=True)
class SourceSpec:
    """Where from: an SGLang-compatible server, seen from the host, and the folder it dumps into.

    Attributes:
        dump_mode: "rid" (the capture plugin: ``<rid>.safetensors``) or "counter" (servers patched in the
            field: ``req_<n>/``).
        log: the server's log file on the host, where known: its death is told there first.
        replicas: further servers of the same model, each with a dump folder of its own.
    """

    url: str
    dump_dir: str
    kind: str = "sglang"
    dump_mode: str = "rid"
    log: str | None = None
    replicas: tuple[Endpoint, ...] = ()
    api_key_env: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True)
class ExtractSpec:
    """One extraction job.

    Attributes:
        attempts: how often a row is asked for in one run attempt before it is quarantined.
        evidence: "recompute" (the lowest tap from the ids) or "win_rate" (design.md 4).
        retake_every: every Nth sample is taken a second time, alone, and compared; 0 = none.
        shard_bytes, shard_seconds: a shard is made durable when it is this large or this old.
    """

    run: str
    store: str
    dataset: DatasetSpec
    target: TargetSpec
    source: SourceSpec
    concurrency: int = 8
    attempts: int = 3
    evidence: str = "recompute"
    retake_every: int = 32
    canary: int = 3
    shard_bytes: int = 256 << 20
    shard_seconds: float = 60.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


def _build(cls: type[T], data: object, where: str) -> T:
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} is not an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        known = ", ".join(fields)
        raise SpecError(f"{where} has unknown keys: {', '.join(unknown)}", "", f"known are {known}")
    missing = [
        n
        for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"{where} lacks {', '.join(missing)}")
    return cls(**data)


def extract_from_json(data: object) -> ExtractSpec:
    """Read and check an ExtractSpec; raises SpecError that names the key."""
    if not isinstance(data, Mapping):
        raise SpecError("the run specification is not an object")
    d = dict(data)
    dataset = dict(d.get("dataset") or {})
    if dataset.get("rows") is not None:
        dataset["rows"] = tuple(dataset["rows"])
    target = dict(d.get("target") or {})
    if isinstance(target.get("taps"), list):
        target["taps"] = tuple(target["taps"])
    d["dataset"] = _build(DatasetSpec, dataset, "dataset")
    d["target"] = _build(TargetSpec, target, "target")
    source = dict(d.get("source") or {})
    replicas = source.get("replicas") or ()
    if not isinstance(replicas, list | tuple):
        raise SpecError("source.replicas is not a list")
    source["replicas"] = tuple(_build(Endpoint, r, "source.replicas") for r in replicas)
    d["source"] = _build(SourceSpec, source, "source")
    spec = _build(ExtractSpec, d, "the run specification")
    _check(spec)
    return spec


def _check(spec: ExtractSpec) -> None:
    taps = spec.target.taps
    if not taps or any(not isinstance(t, int) or t < 0 for t in taps) or list(taps) != sorted(set(taps)):
        raise SpecError(f"bad taps {list(taps)}", "taps are 0-based layer numbers, ascending, each once")
    rows = spec.dataset.rows
    if rows is not None and (len(rows) != 2 or not 0 <= rows[0] < rows[1]):
        raise SpecError(f"bad rows {list(rows)}", "rows are [first, last) with first < last")
    for name, value, allowed in (
        ("target.last", spec.target.last, ("pre", "post", None)),
        ("target.dtype", spec.target.dtype, ("bfloat16", "float32")),
        ("dataset.over_long", spec.dataset.over_long, ("refuse", "quarantine")),
        ("evidence", spec.evidence, ("recompute", "win_rate")),
        ("source.kind", spec.source.kind, ("sglang",)),
        ("source.dump_mode", spec.source.dump_mode, ("rid", "counter")),
    ):
        if value not in allowed:
            raise SpecError(f"bad {name} {value!r}", f"it is one of {', '.join(map(str, allowed))}")
    folders = [spec.source.dump_dir, *(e.dump_dir for e in spec.source.replicas)]
    if len(set(folders)) != len(folders):
        raise SpecError("two servers share a dump folder", ", ".join(folders), "give each one of its own")
    if isinstance(spec.attempts, int) and spec.attempts > 8:
        raise SpecError(
            f"bad attempts {spec.attempts}", "at most 8: their numbers are two digits", "lower it"
        )
    for name, number, least in (
        ("concurrency", spec.concurrency, 1),
        ("attempts", spec.attempts, 1),
        ("canary", spec.canary, 0),
        ("retake_every", spec.retake_every, 0),
        ("shard_bytes", spec.shard_bytes, 1),
        ("dataset.max_tokens", spec.dataset.max_tokens, 1),
    ):
        if not isinstance(number, int) or number < least:
            raise SpecError(f"bad {name} {number!r}", f"it is a whole number of at least {least}")
