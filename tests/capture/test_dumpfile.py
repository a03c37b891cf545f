"""The dump's file: what is written is read again, and nothing else is taken for a dump."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.capture.pythonpath.hsx_capture.beacon import (
    read_beacons,
    remove_beacon,
    remove_leftovers,
    write_beacon,
)
from engine.capture.pythonpath.hsx_capture.dumpfile import (
    Chunk,
    Dump,
    DumpMeta,
    DumpMissing,
    DumpUnreadable,
    WriterFailed,
    dump_path,
    ids_sha256,
    is_name,
    read_dump,
    remove_dump,
    write_dump,
    write_error,
)

if TYPE_CHECKING:
    from pathlib import Path

RID = "hsx-run-00000007-01_"


def a_dump(rows: int = 5) -> Dump:
    ids = list(range(10, 10 + rows))
    meta = DumpMeta(
        rid=RID, num_tokens=rows, ids_sha256=ids_sha256(ids), taps=(1, 3), engine_layer_ids=(2, 4), model="m",
        chunks=(Chunk(0, 3, {"forward": 4}), Chunk(3, rows - 3)), where={"tp_rank": 0, "dump_id": "12-3"},
        producer="test 1",
    )  # fmt: skip
    h = torch.arange(rows * 4, dtype=torch.bfloat16).reshape(rows, 4)
    return Dump(meta, torch.tensor(ids), torch.cat([h, h + 1], 1), h * 2, h * 3)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    dump = a_dump()
    size = write_dump(folder, dump)
    read = read_dump(folder, RID)
    assert read.meta == dump.meta and read.meta.dump_id == "12-3"
    for name, tensor in dump.tensors().items():
        assert torch.equal(read.tensors()[name], tensor) and read.tensors()[name].dtype == tensor.dtype
    path = dump_path(folder, RID)
    assert path.stat().st_size == size and path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_a_bad_dump_says_why_and_has_no_states(tmp_path: Path) -> None:
    dump = a_dump()
    bad = Dump(replace(dump.meta, ok=False, error="a reason", ids_checked=False), dump.input_ids)
    write_dump(tmp_path / "d", bad)
    read = read_dump(tmp_path / "d", RID)
    assert not read.meta.ok and read.meta.error == "a reason" and not read.meta.ids_checked
    assert read.aux is None and read.last is None and read.pre is None


def test_an_error_file_takes_the_place_of_a_dump_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with pytest.raises(DumpMissing):
        read_dump(folder, RID)
    write_dump(folder, a_dump())
    write_error(folder, RID, "12-4", "the disk is full")
    with pytest.raises(WriterFailed, match="the disk is full") as failed:
        read_dump(folder, RID)
    assert failed.value.marker["dump_id"] == "12-4" and failed.value.marker["rid"] == RID
    write_dump(folder, a_dump())
    assert read_dump(folder, RID).meta.ok
    remove_dump(folder, RID)
    with pytest.raises(DumpMissing):
        read_dump(folder, RID)
    assert list(folder.iterdir()) == []


def _rewrite(path: Path, change: str) -> None:
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    if change == "cut":
        path.write_bytes(data[:-10])
        return
    if change == "short":
        path.write_bytes(data[:5])
        return
    if change == "huge header":
        path.write_bytes(struct.pack("<Q", 1 << 62) + data[8:])
        return
    if change == "nested":
        text = b"[" * 50_000
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return
    meta = header["__metadata__"]
    if change == "no metadata":
        del header["__metadata__"]
    elif change == "newer":
        meta["format_version"] = "2"
    elif change == "ok":
        meta["ok"] = "perhaps"
    elif change == "taps":
        meta["taps"] = "[1, null]"
    elif change == "chunks":
        meta["chunks"] = "[5]"
    elif change == "where":
        meta["where"] = "[]"
    else:
        del meta[change]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])


@pytest.mark.parametrize("change", [
    "cut", "short", "huge header", "nested", "no metadata", "newer", "ok", "taps", "chunks", "where", "rid",
    "num_tokens", "ids_sha256", "error",
])  # fmt: skip
def test_a_damaged_dump_is_unreadable(tmp_path: Path, change: str) -> None:
    write_dump(tmp_path / "d", a_dump())
    _rewrite(dump_path(tmp_path / "d", RID), change)
    with pytest.raises(DumpUnreadable):
        read_dump(tmp_path / "d", RID)


def test_unknown_metadata_is_taken(tmp_path: Path) -> None:
    write_dump(tmp_path / "d", a_dump())
    path = dump_path(tmp_path / "d", RID)
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header["__metadata__"]["something_new"] = "yes"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])
    assert read_dump(tmp_path / "d", RID).meta == a_dump().meta


@pytest.mark.parametrize("kind", ["symlink", "fifo", "hardlink"])
def test_a_planted_dump_or_error_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "d"
    other = tmp_path / "other"
    write_dump(other, a_dump())
    write_error(folder, "hsx-x", "", "")
    remove_dump(folder, "hsx-x")
    real = dump_path(other, RID)
    for name in (f"{RID}.safetensors", f"{RID}.error.json"):
        planted = folder / name
        if kind == "symlink":
            planted.symlink_to(real)
        elif kind == "hardlink":
            os.link(real, planted)
        else:
            os.mkfifo(planted)
        with pytest.raises(DumpUnreadable):
            read_dump(folder, RID)
        planted.unlink()


def test_a_dump_larger_than_the_cap_is_refused(tmp_path: Path) -> None:
    size = write_dump(tmp_path / "d", a_dump())
    with pytest.raises(DumpUnreadable, match="more than"):
        read_dump(tmp_path / "d", RID, max_bytes=size - 1)


def test_a_name_is_one_plain_component(tmp_path: Path) -> None:
    assert is_name(RID) and is_name("a" * 128)
    for bad in ("", "a" * 129, "../x", "a/b", ".hidden", "a\n", "ü", "-x"):
        assert not is_name(bad)
        with pytest.raises(DumpUnreadable):
            read_dump(tmp_path, bad)


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses to make the file longer (a limit of this process, as a full disk would)."""
    code = f"""
import resource, signal
from pathlib import Path
from tests.capture.test_dumpfile import a_dump
from engine.capture.pythonpath.hsx_capture.dumpfile import write_dump
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path({str(tmp_path / "d")!r})
write_dump(folder, a_dump())
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    write_dump(folder, a_dump(1000))
except OSError as error:
    print("refused", error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused 27\n", done.stderr
    assert [p.name for p in (tmp_path / "d").iterdir()] == [f"{RID}.safetensors"]
    assert read_dump(tmp_path / "d", RID).meta == a_dump().meta, "the dump before is whole"


def test_a_writer_that_is_killed_leaves_no_dump_and_its_rest_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    code = f"""
import os, signal
from pathlib import Path
from tests.capture.test_dumpfile import a_dump
from engine.capture.pythonpath.hsx_capture import beacon, privatedir, dumpfile
folder = Path({str(folder)!r})
beacon.write_beacon(folder, {{"version": "1"}})
os.rename = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
dumpfile.write_dump(folder, a_dump())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(DumpMissing):
        read_dump(folder, RID)
    assert read_beacons(folder) == [], "its process is gone"
    left = sorted(p.name for p in folder.iterdir())
    assert len(left) == 2 and left[0].startswith(".tmp-")
    assert remove_leftovers(folder) == left
    assert list(folder.iterdir()) == []


def test_a_beacon_is_that_of_a_living_process(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_beacon(folder, {"version": "test 1", "hooks": ["h"]})
    (beacon,) = read_beacons(folder)
    assert beacon["pid"] == os.getpid() and beacon["version"] == "test 1" and beacon["hooks"] == ["h"]
    path = folder / f"plugin-{os.getpid()}.json"
    reused = {**beacon, "start_ticks": beacon["start_ticks"] - 1}
    path.write_text(json.dumps(reused))
    assert read_beacons(folder) == [], "the pid has a new owner"
    write_beacon(folder, {"version": "test 1"})
    write_dump(folder, a_dump())
    assert remove_leftovers(folder) == [], "what lives stays, and so do dumps"
    remove_beacon(folder)
    assert read_beacons(folder) == []
