"""A store comes to this machine whole, byte by byte, over any number of cut links, or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
from typing import TYPE_CHECKING

import pytest

from engine.store.identity import claim
from engine.store.store import Store
from engine.store.verify import Report, verify_store
from engine.wire.errors import Refused, RemoteError, SpecError
from engine.wire.storefiles import check_name
from hsx_tui.deploy import pull as pulling
from hsx_tui.deploy.link import Link
from hsx_tui.deploy.pull import Pull, check_rows
from hsx_tui.deploy.pullfolder import PullFolder
from tests.store.test_store import manifest, record

from .proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx_tui.deploy.pull import Rate

    from .conftest import Host

ROWS, TOKENS = 6, 20_000


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of a row each, together 4 MB."""
    path = tmp_path_factory.mktemp("store") / "s"
    dataset = {"sha256": "d", "first": 0, "rows": ROWS, "order": "file"}
    claim(path, manifest(dataset=dataset))
    writer = Store(path, shard_bytes=1)
    for row in range(ROWS):
        writer.add(record(row, TOKENS))
        writer.commit()
    return path


def files(folder: Path) -> dict[str, bytes]:
    """What a store has, but for the pull's own files."""
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def checked(folder: Path) -> Report:
    """The report at the end of a whole verification."""
    *_, report = verify_store(folder)
    assert isinstance(report, Report)
    return report


async def test_a_pulled_store_is_the_store_and_a_second_pull_brings_nothing(
    link: Link, store: Path, tmp_path: Path
) -> None:
    rates: list[Rate] = []
    first = await Pull(link, str(store), tmp_path / "p", source="h", told=rates.append).run()
    assert files(tmp_path / "p") == files(store)
    assert first.samples == ROWS
    assert first.bytes == sum(map(len, files(store).values()))
    assert rates
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o700
    report = checked(tmp_path / "p")
    assert (report.done, report.bad) == (ROWS, [])

    second = await Pull(link, str(store), tmp_path / "p", source="h").run()
    assert second.transferred <= len((store / "index.jsonl").read_bytes())
    assert files(tmp_path / "p") == files(store)


async def test_only_the_shards_of_the_rows_come_and_the_index_says_no_more(
    link: Link, store: Path, tmp_path: Path
) -> None:
    done = await Pull(link, str(store), tmp_path / "p", source="h", rows=(2, 4)).run()
    assert done.samples == 2
    assert sorted(n for n in files(tmp_path / "p") if n.startswith("shards/")) == [
        "shards/000002.safetensors",
        "shards/000003.safetensors",
    ]
    report = checked(tmp_path / "p")
    assert (report.done, report.bad) == (2, [])
    await Pull(link, str(store), tmp_path / "p", source="h").run()  # the rest, later
    assert files(tmp_path / "p") == files(store)


async def test_a_pull_goes_on_where_each_cut_left_it(
    host: Host, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(pulling, "TELL_S", 0.0)
    monkeypatch.setattr(pulling, "BLOCK", 64 << 10)
    async with FaultProxy(host.address) as proxy:
        link = Link(proxy.address(host.address.known_hosts.read_text()))
        cuts = 0

        def cut(rate: Rate) -> None:
            nonlocal cuts
            if not rate.waiting and rate.done > (cuts + 1) * 900_000:
                cuts += 1
                proxy.reset()

        work = Pull(link, str(store), tmp_path / "p", source="h", told=cut)
        done = await work.run()
        await link.close()
    assert cuts >= 3
    assert files(tmp_path / "p") == files(store)
    assert done.transferred < done.bytes + cuts * 2 * (64 << 10) + 64_000  # nothing came twice


async def test_a_part_that_was_changed_here_is_fetched_anew(link: Link, store: Path, tmp_path: Path) -> None:
    folder = PullFolder(tmp_path / "p", f"h:{store}")
    folder.part("shards/000001.safetensors").write_bytes(b"not those bytes")
    folder.close()
    await Pull(link, str(store), tmp_path / "p", source="h").run()
    assert files(tmp_path / "p") == files(store)


async def test_a_torn_last_line_of_a_running_store_is_left_for_the_next_pull(
    link: Link, store: Path, tmp_path: Path
) -> None:
    growing = tmp_path / "growing"
    shutil.copytree(store, growing)
    lines = (growing / "index.jsonl").read_bytes().splitlines(keepends=True)
    (growing / "index.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:40])
    first = await Pull(link, str(growing), tmp_path / "p", source="h").run()
    assert first.samples == 3
    assert checked(tmp_path / "p").bad == []
    (growing / "index.jsonl").write_bytes(b"".join(lines))
    second = await Pull(link, str(growing), tmp_path / "p", source="h").run()
    assert second.samples == ROWS
    assert files(tmp_path / "p") == files(growing)


async def test_links_planted_in_the_store_are_not_followed(link: Link, store: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(store, bad)
    (tmp_path / "secret").write_text("secret")
    (bad / "shards/000004.safetensors").unlink()
    (bad / "shards/000004.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(RemoteError, match="000004"):  # not listed, so missing
        await Pull(link, str(bad), tmp_path / "p", source="h").run()
    call = link.call("fetch", store=str(bad), name="shards/000004.safetensors", offset=0, size=6)
    with pytest.raises(Refused, match="cannot be read"):
        await call
    assert "secret" not in str(files(tmp_path / "p"))


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "shards/../../x",
        "shards/000000.safetensors\n",
        "index.jsonl/..",
        ".hsx.lock",
        "",
    ],
)
def test_no_other_name_is_a_file_of_a_store(name: str) -> None:
    with pytest.raises(SpecError):
        check_name(name)


@pytest.mark.parametrize(
    "entry", [{"name": "../../.bashrc", "size": 1}, {"name": "index.jsonl", "size": -1}, "x", {"size": 1}]
)
async def test_a_host_that_lists_other_files_is_refused(
    entry: object, tmp_path: Path, link: Link, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lie(*_: object, **__: object) -> dict[str, object]:
        return {"files": [entry]}

    monkeypatch.setattr(link, "call", lie)
    with pytest.raises(RemoteError, match="malformed"):
        await Pull(link, str(store), tmp_path / "p", source="h").run()
    assert not (tmp_path / "p").exists()


async def test_folders_that_are_something_else_are_refused(link: Link, store: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(Refused, match="not empty"):
        await Pull(link, str(store), tmp_path / "mine", source="h").run()
    await Pull(link, str(store), tmp_path / "p", source="h").run()
    with pytest.raises(Refused, match="another store"):
        await Pull(link, str(store), tmp_path / "p", source="another").run()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Refused, match="ours alone"):
        await Pull(link, str(store), tmp_path / "open", source="h").run()
    with pytest.raises(Refused, match="no store"):
        await Pull(link, str(tmp_path / "mine"), tmp_path / "q", source="h").run()
    held = PullFolder(tmp_path / "p", f"h:{store}")
    with pytest.raises(Refused, match="another pull"):
        await Pull(link, str(store), tmp_path / "p", source="h").run()
    held.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k,mode=700", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)


async def test_a_full_disk_is_told_and_the_pull_goes_on_when_there_is_room(
    link: Link, store: Path, small_disk: Path
) -> None:
    with pytest.raises(Refused, match="No space left"):
        await Pull(link, str(store), small_disk / "p", source="h").run()
    before = files(small_disk / "p")
    assert all(files(store)[name] == data for name, data in before.items())
    await asyncio.to_thread(grow, small_disk)
    done = await Pull(link, str(store), small_disk / "p", source="h").run()
    assert files(small_disk / "p") == files(store)
    assert done.transferred < done.bytes  # what was whole, and what was half there, did not come again


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "a:b", "-1:3", "1:2:3"])
def test_rows_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(Refused):
        check_rows(text)


async def test_a_list_goes_on_after_a_name(link: Link, store: Path, tmp_path: Path) -> None:
    crowded = tmp_path / "crowded"
    shutil.copytree(store, crowded)
    (crowded / "quarantine").mkdir(exist_ok=True)
    for row in range(300):
        (crowded / f"quarantine/{row:08d}.json").write_text(json.dumps({"row": row}))
    answer = await link.call("store_files", store=str(crowded), after="quarantine/00000100.json")
    names = [f["name"] for f in answer["files"]]
    assert names[0] == "quarantine/00000101.json"
    assert len(names) == 199 + ROWS
    assert not answer["more"]
