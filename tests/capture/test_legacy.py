"""Counter-numbered dumps on disk: every layout, what is not safe, torn files, leftovers, removal."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from engine.capture import legacy
from engine.capture.legacy import LegacyUnreadable
from engine.capture.legacy_folder import KEEP_BYTES, KEEP_S, LegacyFolder, Seen, changed, touched
from engine.demo.counter_dumps import CounterDumps, _Job, parse_layout

if TYPE_CHECKING:
    from pathlib import Path

N, H = 5, 8


@pytest.fixture
def folder(tmp_path: Path) -> LegacyFolder:
    (tmp_path / "dumps").mkdir(mode=0o700)
    return LegacyFolder(tmp_path / "dumps")


def states(seed: int = 0, n: int = N) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, H, generator=gen) for name in ("aux_0", "aux_1", "final")}


def put(
    folder: LegacyFolder, number: int, layout: str = "pt", n: int = N, seed: int = 0, **meta: Any
) -> Path:
    """A dump by the small server's own writer."""
    writer = CounterDumps(folder.path, 2, H, parse_layout(layout, False))
    writer._write(_Job(0.0, number, states(seed, n), {"num_tokens": n, "forward_mode": "extend", **meta}))
    return folder.path / f"req_{number}"


def seen(folder: LegacyFolder, number: int = 0) -> Seen:
    return folder.scan()[number]


@pytest.mark.parametrize("more", ["", "+no-done", "+single", "+single+no-meta"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_every_layout_is_read(folder: LegacyFolder, suffix: str, more: str) -> None:
    put(folder, 0, suffix + more, input_ids=[3, 1, 4, 1, 5], rid="abc")
    one = seen(folder)
    meta = folder.meta(one)
    assert (meta.num_tokens, meta.mode, meta.input_ids, meta.rid) == (N, "extend", (3, 1, 4, 1, 5), "abc")
    dump = folder.read(one)
    assert dump.meta == meta
    assert list(dump.aux) == [0, 1]
    want = states()
    assert dump.final is not None
    for got, name in ((dump.aux[0], "aux_0"), (dump.aux[1], "aux_1"), (dump.final, "final")):
        assert torch.equal(got, want[name])


def test_what_may_be_absent_may_be_absent(folder: LegacyFolder) -> None:
    place = put(folder, 0)
    (place / "final.pt").unlink()
    (place / "done").unlink()
    (place / "meta.json").write_text('{"num_tokens": 5, "new_key": [1]}')
    dump = folder.read(seen(folder))
    assert dump.final is None
    assert (dump.meta.mode, dump.meta.input_ids, dump.meta.rid) == (None, None, None)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("EXTEND", "extend"),
        ("ForwardMode.DECODE", "decode"),
        (2, "decode"),
        (3, "mixed"),
        (9, "other"),
        ("", None),
    ],
)
def test_forward_modes(folder: LegacyFolder, mode: object, name: str | None) -> None:
    put(folder, 0, forward_mode=mode)
    assert folder.meta(seen(folder)).mode == name


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"num_tokens": 0}', '{"num_tokens": true}', '{"num_tokens": -1}',
        '{"num_tokens": 1e3}',
        '{"num_tokens": 5, "input_ids": [1, 2]}', '{"num_tokens": 2, "input_ids": [1, -2]}',
        '{"num_tokens": 2, "input_ids": "12"}', '{"num_tokens": 99999999999}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_wrong_meta_is_refused(folder: LegacyFolder, text: str) -> None:
    (put(folder, 0) / "meta.json").write_text(text)
    with pytest.raises(LegacyUnreadable):
        folder.meta(seen(folder))


class Canary:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_malicious_pickle_is_refused_and_does_nothing(
    folder: LegacyFolder, tmp_path: Path, how: str
) -> None:
    canary = tmp_path / "canary"
    file = put(folder, 0) / "aux_1.pt"
    if how == "pickle":
        file.write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"aux": torch.zeros(N, H), "x": Canary(canary)}, file)
    with pytest.raises(LegacyUnreadable, match="weights_only"):
        folder.read(seen(folder))
    assert not canary.exists()
    with contextlib.suppress(RuntimeError):  # a bare pickle is no torch file, but by then it has run
        torch.load(file, weights_only=False)
    assert canary.exists(), "the file was harmless: the test proves nothing"


def test_pt_needs_a_new_torch_and_safetensors_does_not(
    folder: LegacyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "torch_version", lambda: (2, 9))
    put(folder, 0)
    put(folder, 1, "safetensors")
    with pytest.raises(LegacyUnreadable, match=r"older than 2\.10"):
        folder.read(seen(folder))
    assert folder.read(seen(folder, 1)).final is not None
    monkeypatch.undo()
    assert legacy.torch_version() >= (2, 10)


def test_a_view_that_claims_more_than_its_file_is_refused(folder: LegacyFolder) -> None:
    file = put(folder, 0) / "aux_0.pt"
    torch.save(torch.zeros(1, 1).expand(N, 1 << 30), file)
    with pytest.raises(LegacyUnreadable, match="claims more"):
        folder.read(seen(folder))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_torn_file_is_refused(folder: LegacyFolder, suffix: str) -> None:
    file = put(folder, 0, suffix) / f"aux_0.{suffix}"
    data = file.read_bytes()
    for size in (0, 4, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(LegacyUnreadable):
            folder.read(seen(folder))
    file.write_bytes(data)
    folder.read(seen(folder))


def test_rows_and_names_must_fit(folder: LegacyFolder) -> None:
    place = put(folder, 0, "safetensors")
    save_file({"aux_0": torch.zeros(N - 1, H)}, place / "aux_0.safetensors")
    with pytest.raises(LegacyUnreadable, match="5 tokens"):
        folder.read(seen(folder))
    save_file({"aux_0": torch.zeros(N, H, dtype=torch.int32)}, place / "aux_0.safetensors")
    with pytest.raises(LegacyUnreadable, match="int32"):
        folder.read(seen(folder))
    torch.save(torch.zeros(N, H), place / "aux_1.pt")
    save_file({"aux_0": torch.zeros(N, H)}, place / "aux_0.safetensors")
    with pytest.raises(LegacyUnreadable, match="there twice"):
        folder.read(seen(folder))
    for name in os.listdir(place):
        if name.startswith("aux"):
            (place / name).unlink()
    with pytest.raises(LegacyUnreadable, match="no aux"):
        folder.read(seen(folder))


def test_links_pipes_and_second_names_are_refused(folder: LegacyFolder, tmp_path: Path) -> None:
    outside = put(folder, 7) / "aux_0.pt"
    for number in range(3):
        (put(folder, number) / "aux_0.pt").unlink()
    (folder.path / "req_0/aux_0.pt").symlink_to(outside)
    os.mkfifo(folder.path / "req_1/aux_0.pt")
    os.link(outside, folder.path / "req_2/aux_0.pt")
    for number in range(3):
        with pytest.raises(LegacyUnreadable):
            folder.read(seen(folder, number))
    (folder.path / "req_8").symlink_to(folder.path / "req_7")
    (folder.path / "req_09").mkdir()
    (folder.path / "other").mkdir()
    (folder.path / "req_9").write_text("no folder")
    assert sorted(folder.scan()) == [0, 1, 2, 7]


def test_a_folder_that_others_may_write_to_is_refused(folder: LegacyFolder, tmp_path: Path) -> None:
    put(folder, 0)
    one = seen(folder)
    (folder.path / "req_0").chmod(0o770)
    with pytest.raises(LegacyUnreadable, match="mode 770"):
        folder.read(one)
    folder.path.chmod(0o777)
    with pytest.raises(LegacyUnreadable, match="mode 777"):
        folder.scan()
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(LegacyUnreadable, match="link"):
        LegacyFolder(tmp_path / "link").scan()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_files_are_ours_or_the_server_s(folder: LegacyFolder) -> None:
    place = put(folder, 0)
    os.chown(place / "aux_0.pt", 12345, -1)
    with pytest.raises(LegacyUnreadable, match="12345"):
        folder.read(seen(folder))
    for path in (folder.path, place, *place.iterdir()):
        os.chown(path, 12345, -1)
    folder.read(seen(folder))


def test_a_leftover_is_new_only_when_every_file_of_it_is(folder: LegacyFolder) -> None:
    place = put(folder, 0, seed=1)
    put(folder, 1)
    before = folder.scan()
    assert changed(before, folder.scan()) == []
    assert touched(before, folder.scan()) == []
    new = folder.path.parent / "new"
    new.mkdir(mode=0o700)
    put(LegacyFolder(new), 0, seed=2)
    for name in sorted(os.listdir(place)):
        assert changed(before, folder.scan()) == [], f"{name} is still the old one"
        (place / name).write_bytes((new / "req_0" / name).read_bytes())
        os.utime(place / name)
        assert touched(before, folder.scan()) == [0], "the server has given the number away"
    (one,) = changed(before, folder.scan())
    final = folder.read(one).final
    assert final is not None
    assert torch.equal(final, states(2)["final"])


def test_a_dump_that_changes_while_it_is_read_is_refused(
    folder: LegacyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = put(folder, 0)
    one = seen(folder)
    read = legacy.read_file

    def slow(dir_fd: int, name: str, *args: Any) -> bytes:
        data = read(dir_fd, name, *args)
        if name == "meta.json":
            (place / "aux_0.pt").write_bytes((place / "aux_1.pt").read_bytes())
        return data

    monkeypatch.setattr(legacy, "read_file", slow)
    with pytest.raises(LegacyUnreadable, match="changed while it was read"):
        folder.read(one)


def test_only_what_was_seen_is_removed(folder: LegacyFolder) -> None:
    put(folder, 0)
    one = seen(folder)
    put(folder, 0, seed=3)
    assert not folder.remove(one)
    assert folder.remove(seen(folder))
    assert folder.scan() == {}


def test_what_is_old_or_too_much_goes(folder: LegacyFolder) -> None:
    for number in range(3):
        put(folder, number)
    old = folder.path / "req_1"
    for file in old.iterdir():
        os.utime(file, (0, 0))
    scan = folder.scan()
    now = max(s.newest_ns for s in scan.values()) / 1e9
    assert folder.prune(scan, now) == 1
    assert sorted(folder.scan()) == [0, 2]
    with (folder.path / "req_0" / "extra").open("wb") as extra:
        extra.truncate(KEEP_BYTES)
    for name in os.listdir(folder.path / "req_0"):
        os.utime(folder.path / "req_0" / name, (now - 5, now - 5))
    fresh = LegacyFolder(folder.path)
    assert fresh.prune(fresh.scan(), now) == 1, "the oldest goes when there is too much"
    assert sorted(fresh.scan()) == [2]
    assert fresh.prune(fresh.scan(), now + KEEP_S + 1) == 1


def test_one_reader_at_a_time(folder: LegacyFolder) -> None:
    other = LegacyFolder(folder.path)
    folder.hold()
    with pytest.raises(LegacyUnreadable, match="another run"):
        other.hold()
    folder.release()
    other.hold()
    other.release()


def test_the_meta_of_a_dump_is_json_for_everybody(folder: LegacyFolder) -> None:
    """The small server's files are the documented ones."""
    place = put(folder, 12)
    assert sorted(os.listdir(place)) == ["aux_0.pt", "aux_1.pt", "done", "final.pt", "meta.json"]
    assert json.loads((place / "meta.json").read_bytes()) == {"num_tokens": N, "forward_mode": "extend"}
    assert place.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in place.iterdir()} == {0o600}
