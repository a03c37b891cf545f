"""Read a whole store again: hashes, shapes, ids, finiteness, accounting. It repairs nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.store.aside import rows_aside
from engine.store.identity import read_manifest
from engine.store.records import IndexLine, parse_index_line, tensors_sha256
from engine.store.shards import open_shard, sample_tensors
from engine.wire.errors import HsxError, StoreError, UsageError
from engine.wire.ids import parse_rid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


@dataclass
class Report:
    """What verify found. ``bad``: (row, reason); done + quarantined + pending == dataset when all is well."""

    dataset: int
    done: int = 0
    quarantined: int = 0
    bytes: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Rows neither done nor set aside."""
        return self.dataset - self.done - self.quarantined

    def to_json(self) -> dict[str, Any]:
        """The object of cli.md."""
        return {
            "schema_version": 1,
            "dataset": self.dataset,
            "done": self.done,
            "quarantined": self.quarantined,
            "pending": self.pending,
            "bad": [{"row": r, "reason": why} for r, why in self.bad],
            "bytes": self.bytes,
        }


def verify_store(
    path: Path, expected_ids: Callable[[int], tuple[int, ...]] | None = None
) -> Iterator[Report | tuple[IndexLine, dict[str, Tensor]]]:
    """Check every sample; yields each good one with its tensors, and at last the Report.

    Args:
        expected_ids: token ids of a dataset row, where the dataset is at hand.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise UsageError(
            f"{path} is not a store", "it has no manifest.json", "give the folder that a run wrote to"
        )
    report = Report(dataset=int(manifest["dataset"]["rows"]))
    first, _ = row_range(manifest)
    rows = range(first, first + report.dataset)
    lines = _lines(path, report)
    shards: dict[str, list[IndexLine]] = {}
    for line in lines.values():
        shards.setdefault(line.shard, []).append(line)
    for name, members in sorted(shards.items()):
        try:
            with open_shard(path, name) as shard:
                report.bytes += (path / name).stat().st_size
                for line in members:
                    reason, tensors = _check(shard, line, manifest, rows, expected_ids)
                    if reason is None:
                        report.done += 1
                        yield line, tensors
                    else:
                        report.bad.append((line.row, reason))
        except StoreError as error:
            report.bad += [(line.row, str(error)) for line in members]
    set_aside = rows_aside(path)
    report.bad += [(row, "both done and in quarantine") for row in sorted(set_aside & set(lines))]
    report.quarantined = len(set_aside - set(lines))
    if report.pending < 0:
        report.bad.append(
            (-1, f"done {report.done} + quarantined {report.quarantined} > dataset {report.dataset}")
        )
    yield report


def row_range(manifest: dict[str, Any]) -> tuple[int, int]:
    """[first, last) of the dataset's rows that this store is for."""
    first = int(manifest["dataset"].get("first", 0))
    return first, first + int(manifest["dataset"]["rows"])


def _lines(path: Path, report: Report) -> dict[int, IndexLine]:
    lines: dict[int, IndexLine] = {}
    index = path / "index.jsonl"
    raw = index.read_bytes() if index.exists() else b""
    for number, text in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            line = parse_index_line(json.loads(text))
        except (ValueError, HsxError) as error:
            report.bad.append((-1, f"index.jsonl line {number} is damaged: {error}"))
            continue
        if line.row in lines:
            report.bad.append((line.row, "twice in the index"))
        lines[line.row] = line
    return lines


def _check(
    shard: Any,
    line: IndexLine,
    manifest: dict[str, Any],
    rows: range,
    expected_ids: Callable[[int], tuple[int, ...]] | None,
) -> tuple[str | None, dict[str, Tensor]]:
    """(reason or None, tensors)."""
    import torch

    if line.row not in rows:
        return f"row outside of the dataset's rows {rows.start}:{rows.stop}", {}
    rid = parse_rid(line.rid)
    if rid is None or rid.row != line.row:
        return f"its request id {line.rid!r} is not one of this row", {}
    try:
        t = sample_tensors(shard, line.row)
    except StoreError as error:
        return str(error), {}
    n, k, h = line.n_tokens, len(manifest["taps"]), int(manifest["target"]["hidden_size"])
    shapes = {"input_ids": (n,), "loss_mask": (n,), "taps": (n, k, h)} | (
        {"last": (n, h)} if manifest["last"] else {}
    )
    for name, shape in shapes.items():
        if name not in t:
            return f"{name} is missing", {}
        if tuple(t[name].shape) != shape:
            return f"{name} is {list(t[name].shape)}, expected {list(shape)}", {}
        if name in ("taps", "last"):
            if t[name].dtype != getattr(torch, manifest["dtype"]):
                return f"{name} is {t[name].dtype}, expected {manifest['dtype']}", {}
            if not bool(torch.isfinite(t[name]).all()):
                return f"{name} has NaN or infinite values", {}
    if tensors_sha256(t) != line.sha256:
        return "its sha256 differs from the index", {}
    if expected_ids is not None and tuple(t["input_ids"].tolist()) != expected_ids(line.row):
        return "its token ids differ from the dataset's", {}
    return None, t
