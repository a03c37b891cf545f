"""Dataset rows: four forms, and every bad line named."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from engine.dataset.rows import RowFile
from engine.wire.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_the_four_forms(tmp_path: Path) -> None:
    f = RowFile(
        write(
            tmp_path,
            {"id": "a", "messages": [{"role": "user", "content": "hi"}]},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"prompt": "p", "completion": "c"},
            {"input_ids": [1, 2], "loss_mask": [0, 1]},
            {"input_ids": [7]},
        )
    )
    rows = [f.read(i) for i in range(len(f))]
    assert rows[0].id == "a"
    assert [m["role"] for m in rows[1].messages] == ["user", "assistant"]
    assert rows[2].messages[1]["content"] == "c"
    assert (rows[3].input_ids, rows[3].loss_mask) == ((1, 2), (0, 1))
    assert (rows[4].input_ids, rows[4].loss_mask) == ((7,), None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({}, "none of messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "no content"),
        ({"messages": [{"content": "x"}]}, "lacks its role"),
        ({"messages": [{"role": "user", "content": 7}]}, "not text"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "unknown speaker"),
        ({"input_ids": []}, "not a list of token ids"),
        ({"input_ids": [1, -2]}, "not a list of token ids"),
        ({"input_ids": [1, True]}, "not a list of token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: object, why: str) -> None:
    f = RowFile(write(tmp_path, {"input_ids": [1]}, line))
    with pytest.raises(DatasetError) as caught:
        f.read(1)
    assert "row 1 (line 2)" in caught.value.what
    assert why in caught.value.why
    assert caught.value.next_step


def test_blank_lines_empty_and_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="blank"):
        RowFile(write(tmp_path, {"input_ids": [1]}, "", {"input_ids": [2]}))
    with pytest.raises(DatasetError, match="empty"):
        RowFile(write(tmp_path))
    with pytest.raises(DatasetError, match="cannot read"):
        RowFile(tmp_path / "none.jsonl")
    with pytest.raises(DatasetError, match="cannot read"):
        RowFile(tmp_path)


def test_the_identity_is_the_raw_bytes(tmp_path: Path) -> None:
    import hashlib

    path = write(tmp_path, {"input_ids": [1]})
    assert RowFile(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same but for the file itself
    other.replace(path)


def rewrite(path: Path) -> None:
    status = path.stat()
    path.write_text('{"input_ids": [9]}\n{"input_ids": [8]}\n')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def append(path: Path) -> None:
    status = path.stat()
    with path.open("a") as f:
        f.write("{}\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [replace, rewrite, append, truncate, remove])
def test_a_dataset_that_changes_under_the_run_is_noticed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    f = RowFile(write(tmp_path, {"input_ids": [1]}, {"input_ids": [2]}))
    assert f.read(1).input_ids == (2,)
    change(f.path)
    with pytest.raises(DatasetError, match="changed while the run uses it") as caught:
        f.read(0)
    assert "resume" in caught.value.next_step


def test_its_descriptor_is_given_back(tmp_path: Path) -> None:
    f = RowFile(write(tmp_path, {"input_ids": [1]}))
    before = len(os.listdir("/proc/self/fd"))
    del f
    assert len(os.listdir("/proc/self/fd")) == before - 1
