"""The store: durable in the right order, whole after every kind of crash, refused when it is another's."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.store.identity import build_manifest, check, claim, differences, read_manifest
from engine.store.records import Record
from engine.store.shards import open_shard, sample_tensors
from engine.store.store import Store, read_index
from engine.store.verify import Report, verify_store
from engine.wire.errors import IdentityError, StoreError, UsageError
from engine.wire.ids import rid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

H, TAPS = 8, (1, 3)


def manifest(**changes: Any) -> dict[str, Any]:
    target = {"model": "m", "revision": None, "architecture": "A", "num_layers": 6, "hidden_size": H}
    return build_manifest(
        **{
            "target": target,
            "taps": TAPS,
            "last": "pre",
            "dtype": "bfloat16",
            "attribution": "rid",
            "dataset": {"sha256": "d", "first": 0, "rows": 5, "order": "file"},
            "tokenizer_sha256": "t",
            "chat_template": {"sha256": "c", "thinking": False},
            **changes,
        }
    )


def record(row: int, n: int = 3, attempt: int = 1) -> Record:
    g = torch.Generator().manual_seed(row)
    tensors = {
        "input_ids": torch.arange(n) + row,
        "loss_mask": torch.ones(n, dtype=torch.uint8),
        "taps": torch.randn(n, len(TAPS), H, generator=g).to(torch.bfloat16),
        "last": torch.randn(n, H, generator=g).to(torch.bfloat16),
    }
    return Record(row, rid("r", row, attempt), attempt, tensors, {}, {"kind": "recompute", "value": 0.0})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    claim(tmp_path / "s", manifest())
    return tmp_path / "s"


def report(path: Path, ids: Callable[[int], tuple[int, ...]] | None = None) -> Report:
    *_, last = verify_store(path, ids)
    assert isinstance(last, Report)
    return last


def fill(path: Path, *rows: int) -> Store:
    store = Store(path)
    for row in rows:
        store.add(record(row))
    store.commit()
    return store


def test_done_is_what_has_a_line_in_the_index(path: Path) -> None:
    store = Store(path)
    store.add(record(0))
    assert not store.done
    lines = store.commit()
    assert [line.row for line in lines] == [0]
    again = Store(path)
    assert set(again.done) == {0}
    with open_shard(path, again.done[0].shard) as shard:
        tensors = sample_tensors(shard, 0)
    assert torch.equal(tensors["taps"], record(0).tensors["taps"])
    assert report(path).to_json() | {"bytes": 0} == {
        "schema_version": 1,
        "dataset": 5,
        "done": 1,
        "quarantined": 0,
        "pending": 4,
        "bad": [],
        "bytes": 0,
    }


def test_shard_durable_but_lines_lost_is_recovered(path: Path) -> None:
    fill(path, 0, 1)
    before = (path / "index.jsonl").read_bytes()
    fill(path, 2, 3)
    (path / "index.jsonl").write_bytes(before)  # the crash came between the shard and its lines
    store = Store(path)
    assert set(store.done) == {0, 1, 2, 3}
    assert [line.row for line in store.recovered] == [2, 3]
    assert not report(path).bad


@pytest.mark.parametrize("cut", [1, 40])
def test_torn_index_line_is_mended_from_its_shard(path: Path, cut: int) -> None:
    fill(path, 0, 1)
    data = (path / "index.jsonl").read_bytes()
    (path / "index.jsonl").write_bytes(data[:-cut])
    store = Store(path)
    assert set(store.done) == {0, 1}
    assert not report(path).bad
    assert len((path / "index.jsonl").read_bytes().splitlines()) == 2


def test_lost_index_is_rebuilt(path: Path) -> None:
    fill(path, 0, 1)
    fill(path, 2)
    (path / "index.jsonl").unlink()
    assert set(Store(path).done) == {0, 1, 2}


def test_leftovers_of_a_crash_are_removed_and_numbers_go_on(path: Path) -> None:
    fill(path, 0)
    (path / "shards" / ".tmp-1-000001.safetensors").write_bytes(b"half")
    store = fill(path, 1)
    assert store.done[1].shard == "shards/000001.safetensors"
    assert sorted(p.name for p in (path / "shards").iterdir()) == ["000000.safetensors", "000001.safetensors"]


def test_a_row_is_never_taken_twice(path: Path) -> None:
    store = fill(path, 0)
    with pytest.raises(StoreError, match="done already"):
        store.add(record(0))
    store.add(record(1))
    with pytest.raises(StoreError, match="done already"):
        store.add(record(1))


def test_full_disk_keeps_the_buffer_and_leaves_nothing(path: Path) -> None:
    import resource

    store = fill(path, 0)
    store.add(record(1, n=4096))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # the write fails as on a full disk
    try:
        with pytest.raises(StoreError, match="cannot write") as caught:
            store.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free space" in str(caught.value).lower()
    assert [p.name for p in (path / "shards").iterdir()] == ["000000.safetensors"]
    assert [line.row for line in store.commit()] == [1]
    assert not report(path).bad


def test_quarantine_is_released_when_the_row_is_done(path: Path) -> None:
    store = Store(path)
    store.quarantine(2, {"cause": "swapped"}, {"aux": torch.zeros(1, 2)})
    assert Store(path).quarantined == {2}
    assert report(path).quarantined == 1
    store.add(record(2))
    store.commit()
    assert not store.quarantined
    assert not list((path / "quarantine").iterdir())


def test_identity_is_written_once_and_every_difference_is_listed(path: Path) -> None:
    assert claim(path, manifest()) == read_manifest(path)
    with pytest.raises(IdentityError) as caught:
        claim(path, manifest(taps=(0, 3), dtype="float32"))
    assert "taps: the store has [1, 3], this run has [0, 3]" in caught.value.why
    assert "dtype: the store has 'bfloat16', this run has 'float32'" in caught.value.why
    assert read_manifest(path) == manifest()


def test_a_folder_with_files_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(IdentityError, match="no manifest"):
        claim(tmp_path, manifest())
    assert os.listdir(tmp_path) == ["photo.jpg"]
    with pytest.raises(UsageError, match="is not a store"):
        report(tmp_path)


def test_what_a_kill_in_the_manifests_write_left_is_no_foreign_file(tmp_path: Path) -> None:
    store = tmp_path / "s"
    store.mkdir()
    (store / ".hsx.lock").touch()
    (store / ".tmp-0a1b2c3d4e5f-manifest.json").write_bytes(b"{")
    assert check(store, manifest()) is False
    assert len(os.listdir(store)) == 2
    claim(store, manifest())
    assert sorted(os.listdir(store)) == [".hsx.lock", "manifest.json"]


def test_check_compares_and_changes_nothing(tmp_path: Path) -> None:
    store = tmp_path / "a" / "s"
    assert check(store, manifest()) is False
    assert os.listdir(tmp_path) == []
    claim(store, manifest())
    before = (store / "manifest.json").stat()
    assert check(store, manifest()) is True
    with pytest.raises(IdentityError, match="dtype: the store has 'bfloat16'"):
        check(store, manifest(dtype="float32"))
    assert (store / "manifest.json").stat() == before
    foreign = tmp_path / "foreign"
    (foreign / ".tmp-folder").mkdir(parents=True)
    with pytest.raises(IdentityError, match="no manifest"):
        check(foreign, manifest())


@pytest.mark.parametrize("name", [".tmp-abc-00000001.json", "notes.json", "1.json", "00000001.json~"])
def test_what_is_no_entry_of_the_quarantine_does_not_count(path: Path, name: str) -> None:
    Store(path).quarantine(2, {"cause": "swapped"}, None)
    (path / "quarantine" / name).write_bytes(b"{}")
    found = report(path)
    assert (found.quarantined, found.bad) == (1, [])
    assert Store(path).quarantined == {2}


def test_an_entry_is_valid_json_whatever_the_evidence_holds(path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    evidence = {"row_error": [math.inf, -math.inf, {"least": math.nan}], "at": path, 3: (torch.tensor(1),)}
    Store(path).quarantine(2, {"cause": "corrupt", "evidence": evidence}, None)
    entry = json.loads((path / "quarantine" / "00000002.json").read_bytes(), parse_constant=refuse)
    assert entry["evidence"]["row_error"] == ["inf", "-inf", {"least": "nan"}]
    assert entry["evidence"]["at"] == str(path)
    assert entry["row"] == 2


def test_a_newer_format_is_refused(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({**manifest(), "format_version": 2}))
    with pytest.raises(StoreError, match="newer engine"):
        read_manifest(path)


def test_extra_keys_of_a_newer_writer_are_no_difference() -> None:
    assert differences({**manifest(), "future": 1}, manifest()) == []


def flip_a_byte(path: Path) -> None:
    shard = path / "shards" / "000000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(bytes(data))


def double_a_line(path: Path) -> None:
    index = path / "index.jsonl"
    index.write_bytes(index.read_bytes() + index.read_bytes().splitlines(keepends=True)[0])


def truncate_shard(path: Path) -> None:
    shard = path / "shards" / "000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def remove_shard(path: Path) -> None:
    (path / "shards" / "000000.safetensors").unlink()


def other_row(path: Path) -> None:
    index = path / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"row":0', b'"row":4'))


def damaged_line(path: Path) -> None:
    index = path / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"rid":"hsx-r-00000000-01_"', b'"rid":7'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "sha256 differs"),
        (double_a_line, "twice in the index"),
        (truncate_shard, "cannot read"),
        (remove_shard, "cannot read"),
        (other_row, "not one of this row"),
        (damaged_line, "damaged"),
    ],
)
def test_verify_finds_every_damage(path: Path, damage: Callable[[Path], None], reason: str) -> None:
    fill(path, 0, 1)
    damage(path)
    bad = report(path).bad
    assert any(reason in why for _, why in bad), bad


def test_verify_compares_ids_with_the_dataset(path: Path) -> None:
    fill(path, 0)
    assert not report(path, lambda row: (row, row + 1, row + 2)).bad
    assert report(path, lambda _row: (9, 9, 9)).bad == [(0, "its token ids differ from the dataset's")]


def test_nan_is_found(path: Path) -> None:
    bad = record(0)
    bad.tensors["taps"][1, 1, 3] = torch.nan
    store = Store(path)
    store.add(bad)
    store.commit()
    assert report(path).bad == [(0, "taps has NaN or infinite values")]


def test_an_index_with_a_row_twice_is_not_opened(path: Path) -> None:
    fill(path, 0)
    double_a_line(path)
    with pytest.raises(StoreError, match="twice"):
        read_index(path)
