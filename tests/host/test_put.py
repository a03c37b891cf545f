"""Small files of the console's arrive whole or not at all."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from engine.wire.errors import RemoteError, SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from .support import Home

DATA = b'{"messages": []}\n\xff\x00' * 1000
SHA = hashlib.sha256(DATA).hexdigest()


def files(home: Home) -> list[Path]:
    return list(home.path.glob(".local/state/hsx/files/*"))


def test_a_file_is_written_once_and_then_present(home: Home) -> None:
    first = home.call("put", DATA, path="data.jsonl", sha256=SHA, size=len(DATA))
    again = home.call("put", path="data.jsonl", sha256=SHA, size=len(DATA))
    assert (first["state"], again["state"]) == ("written", "present")
    assert files(home)[0].read_bytes() == DATA
    assert again["path"] == str(files(home)[0])
    assert files(home)[0].stat().st_mode & 0o777 == 0o600


def test_other_content_replaces_the_file(home: Home) -> None:
    home.call("put", DATA, path="data.jsonl", sha256=SHA, size=len(DATA))
    home.call("put", b"new", path="data.jsonl", sha256=hashlib.sha256(b"new").hexdigest(), size=3)
    assert [f.read_bytes() for f in files(home)] == [b"new"]


@pytest.mark.parametrize(("payload", "message"), [(DATA[:-1], "incomplete"), (DATA[:-1] + b"x", "changed")])
def test_a_damaged_transfer_leaves_nothing(home: Home, payload: bytes, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        home.call("put", payload, path="data.jsonl", sha256=SHA, size=len(DATA))
    assert files(home) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", "a/b", "", "a\nb", "x" * 200, "\x1b[2J"])
def test_a_name_that_is_a_path_or_odd_is_refused(home: Home, name: str) -> None:
    with pytest.raises(SpecError, match="bad path"):
        home.call("put", DATA, path=name, sha256=SHA, size=len(DATA))


def test_a_planted_symlink_is_replaced_and_not_written_through(home: Home, tmp_path: Path) -> None:
    folder = home.path / ".local/state/hsx/files"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "victim").write_text("mine")
    (folder / "data.jsonl").symlink_to(tmp_path / "victim")
    home.call("put", DATA, path="data.jsonl", sha256=SHA, size=len(DATA))
    assert (tmp_path / "victim").read_text() == "mine"
    assert (folder / "data.jsonl").read_bytes() == DATA
