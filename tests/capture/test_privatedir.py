"""Only private regular files of ours are read, and nothing is written through a planted name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from engine.capture.pythonpath.hsx_capture.privatedir import (
    NotPrivate,
    create_member,
    open_member,
    open_private_dir,
    read_member,
    write_member,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    path = tmp_path / "private"
    fd = open_private_dir(path, create=True)
    yield path, fd
    os.close(fd)


def test_a_folder_is_made_private_and_must_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "private"
    os.close(open_private_dir(path, create=True))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o750)
    with pytest.raises(NotPrivate, match="mode 750"):
        open_private_dir(path, create=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(OSError):
        open_private_dir(link)
    with pytest.raises(FileNotFoundError):
        open_private_dir(tmp_path / "none")


def test_what_is_written_can_be_read(folder: tuple[Path, int]) -> None:
    path, fd = folder
    write_member(fd, "a", ".tmp", b"one")
    write_member(fd, "a", ".tmp", b"two")
    assert read_member(fd, "a", 10) == b"two"
    assert (path / "a").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "hardlink", "directory", "large", "socket"])
def test_a_planted_member_is_refused(folder: tuple[Path, int], kind: str) -> None:
    path, fd = folder
    target = path.parent / "target"
    target.write_bytes(b"secret")
    planted = path / "x"
    if kind == "symlink":
        planted.symlink_to(target)
    elif kind == "dangling":
        planted.symlink_to(path.parent / "none")
    elif kind == "fifo":
        os.mkfifo(planted)
    elif kind == "hardlink":
        os.link(target, planted)
    elif kind == "directory":
        planted.mkdir()
    elif kind == "socket":
        os.mknod(planted, 0o600 | 0o140000)
    else:
        planted.write_bytes(b"x" * 101)
    with pytest.raises(NotPrivate):
        open_member(fd, "x", 100)
    assert target.read_bytes() == b"secret"


def test_another_users_file_is_refused(folder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, fd = folder
    (path / "x").write_bytes(b"x")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(NotPrivate, match=f"belongs to user {owner}"):
        open_member(fd, "x", 100)
    with pytest.raises(NotPrivate, match=f"belongs to user {owner}"):
        open_private_dir(path)


def test_a_planted_name_is_not_written_through(folder: tuple[Path, int]) -> None:
    path, fd = folder
    target = path.parent / "target"
    target.write_bytes(b"keep")
    (path / "new").symlink_to(target)
    with pytest.raises(FileExistsError):
        create_member(fd, "new")
    write_member(fd, "new", ".tmp", b"data")
    assert target.read_bytes() == b"keep", "the link was replaced, not followed"
    assert not (path / "new").is_symlink()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "/etc/passwd", "a\0b"])
def test_a_name_is_one_component(folder: tuple[Path, int], name: str) -> None:
    with pytest.raises(NotPrivate):
        open_member(folder[1], name, 100)
    with pytest.raises(NotPrivate):
        create_member(folder[1], name)
