"""Before anything is asked for: would this run fail, or produce wrong data? Every check is listed, passed
or not, with its severity, what it would do to the data, and what mends it (docs/preflight.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.capture.evidence import TOLERANCE
from engine.run.capture_checks import Room, capture_active, dump_room, look
from engine.run.checklist import Check, error, info, merge, refuse_if_failed
from engine.run.layer_checks import (
    conv_state,
    hidden_sizes,
    is_hybrid,
    layers_asked,
    layers_captured,
    taps_exist,
)
from engine.run.server_checks import Wanted, server_checks
from engine.run.server_settings import differences, schedulers
from engine.targets.lowest import load_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.dataset.samples import Counted
    from engine.sources.protocol import SourceFacts
    from engine.targets.lowest import TargetFacts
    from engine.wire.spec import Endpoint, ExtractSpec, SourceSpec

__all__ = ["Estimate", "estimate", "length_limit", "over_long", "refuse_if_failed", "run_checks"]

_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """What the run will need: tokens and bytes of the store, bytes of dumps at most at once.

    ``dump_free_bytes`` is the least of the servers' dump folders, ``dump_longest_bytes`` of the longest row.
    """

    samples: int
    tokens: int
    bytes: int
    bytes_per_token: int
    free_bytes: int
    dump_bytes: int
    dump_free_bytes: int
    dump_longest_bytes: int

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
        bytes_per_token=per_token,
        free_bytes=_free(Path(spec.store)),
        dump_bytes=sum(at_once) * dump_token,
        dump_free_bytes=min(_free(Path(e.dump_dir)) for e in _endpoints(spec)),
        dump_longest_bytes=max(at_once, default=0) * dump_token,
    )


def _endpoints(spec: ExtractSpec) -> list[SourceSpec | Endpoint]:
    return [spec.source, *spec.source.replicas]


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    s = os.statvfs(path)
    return s.f_bavail * s.f_frsize


def run_checks(
    spec: ExtractSpec, target: TargetFacts, source: SourceFacts, counted: Counted, size: Estimate
) -> list[Check]:
    """All checks, in the order in which a person would want them."""
    want = wanted(spec, target, counted)
    checks = [
        _model(spec, source),
        *_agreement(source),
        *merge([(e.url, _of_server(e, source, want, size)) for e in _endpoints(spec)]),
        _dtype(source),
        taps_exist(want),
        _lengths(spec, target, source, counted),
        _mask(counted),
        _disk(size),
    ]
    if not want.by_rid:
        from engine.run.preflight_counter import counter_checks

        checks += counter_checks(spec, source, counted)
    return list(dict.fromkeys(checks))


def wanted(spec: ExtractSpec, target: TargetFacts, counted: Counted) -> Wanted:
    """What the run wants of each server. A row beyond the run's own limit is never asked for."""
    config = load_config(spec.target.model).get_text_config().to_dict()
    return Wanted(
        taps=spec.target.taps,
        last=spec.target.last,
        longest=min(counted.longest[1], spec.dataset.max_tokens),
        architecture=target.architecture,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        hybrid=is_hybrid(config),
        by_rid=spec.source.dump_mode == "rid",
    )


def _of_server(
    endpoint: SourceSpec | Endpoint, source: SourceFacts, want: Wanted, size: Estimate
) -> list[Check]:
    """The checks of one server: its settings, its schedulers', its dump folder."""
    told, folder = source.infos.get(endpoint.url, {}), Path(endpoint.dump_dir)
    room = Room(size.dump_bytes, size.dump_longest_bytes, _free(folder))
    states = schedulers(told)
    checks = differences(told)
    beacons, trouble = look(folder) if want.by_rid else ([], "")
    for settings in states:
        checks += server_checks(settings, want)
        checks += layers_asked(settings, want)
        state = conv_state(settings, beacons, want)
        checks += [state] if state is not None else []
    if want.by_rid:
        checks += capture_active(beacons, trouble, folder, len(states))
        checks += layers_captured(beacons, want) + hidden_sizes(beacons, want)
    checks += dump_room(folder, room, beacons)
    return list(dict.fromkeys(checks))


def _model(spec: ExtractSpec, source: SourceFacts) -> Check:
    mine, theirs = spec.target.model.rstrip("/"), source.model.rstrip("/")
    detail = f"the run wants {mine}, the server has {theirs}"
    if mine == theirs or os.path.realpath(mine) == os.path.realpath(theirs):
        return info("model", detail)
    effect = "another model's states would be stored under this one's name"
    return error("model", detail, effect, "start the server with that model")


def _agreement(source: SourceFacts) -> list[Check]:
    """What the source itself found: servers of one run that differ, a dump folder that cannot be used."""
    if not source.problems:
        return []
    effect = "states of one store would not be of one kind, or not be there at all"
    step = "restart the server with the capture's flags, all servers of a run with the same"
    return [error("server settings", "; ".join(source.problems), effect, step)]


def _dtype(source: SourceFacts) -> Check:
    detail = f"the server computes in {source.dtype or 'an unknown dtype'}"
    if source.dtype in TOLERANCE:
        return info("dtype", detail)
    effect = "no tolerance is known under which its states could be judged"
    return error("dtype", detail, effect, f"start the server with --dtype {' or '.join(TOLERANCE)}")


def _limits(spec: ExtractSpec, target: TargetFacts, source: SourceFacts) -> dict[str, int]:
    """Everything that bounds a row's length, by name, in tokens."""
    inputs = [s.longest_input for told in source.infos.values() for s in schedulers(told)]
    limits = {
        "max_tokens": spec.dataset.max_tokens,
        "the server's context less 1": source.context_length - 1,
        "the server's max_req_input_len less 1": min((n for n in inputs if n is not None), default=0),
        "the model's positions": target.max_positions,
    }
    return {name: limit for name, limit in limits.items() if limit > 0}


def _lengths(spec: ExtractSpec, target: TargetFacts, source: SourceFacts, counted: Counted) -> Check:
    name, limit = min(_limits(spec, target, source).items(), key=lambda x: x[1])
    over = over_long(counted.n_tokens, limit)
    if not over or spec.dataset.over_long == "quarantine":
        row, longest = counted.longest
        set_aside = f"; {len(over)} rows are beyond it and will be quarantined" if over else ""
        detail = f"longest is row {row} with {longest} tokens, limit {limit} ({name}){set_aside}"
        return info("lengths", detail)
    shown = ", ".join(f"{r} ({counted.n_tokens[r]})" for r in over[:5])
    return error(
        "lengths",
        f"{len(over)} rows are longer than {limit} tokens ({name}): {shown}",
        "the server would refuse them, or cut them",
        "raise the limit, shorten them, or set over_long = quarantine",
    )


def length_limit(spec: ExtractSpec, target: TargetFacts, source: SourceFacts) -> int:
    """The longest row that can be taken, in tokens."""
    return min(_limits(spec, target, source).values())


def over_long(n_tokens: Mapping[int, int], limit: int) -> list[int]:
    """The rows beyond the limit."""
    return [r for r, n in n_tokens.items() if n > limit]


def _mask(counted: Counted) -> Check:
    empty = [r for r, n in counted.supervised.items() if n == 0]
    total = sum(counted.supervised.values())
    if not empty:
        return info("loss mask", f"{total} of {counted.total} tokens are supervised, every row has some")
    return error(
        "loss mask",
        f"{len(empty)} rows have no supervised token: {', '.join(map(str, empty[:10]))}",
        "they would train nothing",
        "check the chat template's assistant turns, or remove them",
    )


def _disk(size: Estimate) -> Check:
    need = int(size.bytes * 1.05) + (64 << 20)
    per_token = f"{size.tokens} tokens x {size.bytes_per_token} bytes"
    detail = f"needs {size.bytes / 1e9:.2f} GB ({per_token}), {size.free_bytes / 1e9:.2f} GB are free"
    if need <= size.free_bytes:
        return info("disk", detail)
    effect = "the run would stop when the disk is full (what is done stays)"
    return error("disk", detail, effect, "free space, or put the store elsewhere")
