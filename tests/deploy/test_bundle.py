"""The engine arrives on a host whole and verified, or not at all, and nothing else there is touched."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import engine
from engine.wire.errors import LinkLost, RemoteError, SpecError
from hsx_tui.deploy.bundle import Bundle, engine_argv, engine_bundle, install_engine, make_bundle
from hsx_tui.deploy.session import Session, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .conftest import Host

ESCAPED = Path("/tmp/hsx-escaped.py")
PACKAGE = Path(engine.__file__).parent


@pytest.fixture
async def session(host: Host) -> AsyncIterator[Session]:
    shutil.rmtree(host.home / ".cache", ignore_errors=True)
    async with await connect(host.address) as session:
        yield session


def folder_names(host: Host) -> list[str]:
    root = host.home / ".cache/hsx/engine"
    return sorted(p.name for p in root.iterdir()) if root.exists() else []


def copy_of_engine(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE / "wire", tmp_path / "engine"))


def test_a_bundle_is_named_by_its_content_alone(tmp_path: Path) -> None:
    package = copy_of_engine(tmp_path)
    first = make_bundle(package)
    (package / "ids.py").touch()
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__/ids.cpython-311.pyc").write_bytes(b"x")
    (package / "notes.txt").write_text("not part of it")
    assert make_bundle(package) == first
    (package / "ids.py").write_text("# changed\n")
    assert make_bundle(package).id != first.id


def test_the_bundle_holds_the_code_and_the_data_of_the_engine() -> None:
    with tarfile.open(fileobj=io.BytesIO(engine_bundle().data)) as tar:
        names = set(tar.getnames())
    assert {"MANIFEST.json", "engine/__init__.py", "engine/host/verbs.py", "engine/wire/verbs.py"} <= names
    assert any(name.startswith("engine/demo/data/") for name in names)


async def test_install_verify_and_repair(session: Session, host: Host) -> None:
    first = await install_engine(session)
    again = await install_engine(session)
    assert (first.state, again.state) == ("installed", "present")
    assert again.dir == first.dir == str(host.home / ".cache/hsx/engine" / engine_bundle().id)
    assert first.python.startswith("/")
    module = Path(first.dir) / "engine/wire/ids.py"
    module.write_text(module.read_text() + "# tampered\n")
    assert (await install_engine(session)).state == "replaced"
    (Path(first.dir) / "engine/extra.py").write_text("raise SystemExit\n")
    assert (await install_engine(session)).state == "replaced"
    (Path(first.dir) / ".ok").unlink()
    assert (await install_engine(session)).state == "replaced"
    assert (await install_engine(session)).state == "present"
    assert folder_names(host) == [first.id]


async def test_a_race_of_four_leaves_one_whole_engine(host: Host, session: Session) -> None:
    sessions = await asyncio.gather(*(connect(host.address) for _ in range(4)))
    try:
        states = [i.state for i in await asyncio.gather(*(install_engine(s) for s in sessions))]
    finally:
        await asyncio.gather(*(s.close() for s in sessions))
    assert states.count("installed") == 1
    assert set(states) <= {"installed", "raced", "present"}
    assert (await install_engine(session)).state == "present"
    assert folder_names(host) == [engine_bundle().id]


async def test_a_truncated_transfer_is_refused_and_leaves_nothing(session: Session, host: Host) -> None:
    bundle = engine_bundle()
    async with session.open("install", id=bundle.id, size=len(bundle.data)) as call:
        assert (await call.answer())["state"] == "send"
        call.send(bundle.data[:-100])
        call.send_eof()
        with pytest.raises(RemoteError, match="arrived incomplete"):
            await call.answer()
    assert folder_names(host) == []


async def test_a_link_cut_during_the_upload_leaves_nothing_that_counts(session: Session, host: Host) -> None:
    bundle = engine_bundle()
    async with session.open("install", id=bundle.id, size=len(bundle.data)) as call:
        assert (await call.answer())["state"] == "send"
        call.send(bundle.data[:-100])
        await asyncio.sleep(0.05)
        host.drop()
        with pytest.raises(LinkLost):  # the host drops when it gets to it: not a connection made meanwhile
            await call.answer()
    async with await connect(host.address) as again:
        assert (await install_engine(again)).state == "installed"


def packed(files: dict[str, bytes], manifest: bytes | None = None, link: bool = False) -> Bundle:
    """A bundle made by hand, with the id that its manifest gives it."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps(hashes).encode() if manifest is None else manifest
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, content in {"MANIFEST.json": manifest, **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo("engine/link.py")
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return Bundle(hashlib.sha256(manifest).hexdigest(), raw.getvalue())


@pytest.mark.parametrize(
    ("bundle", "message"),
    [
        (packed({"../escaped.py": b""}), "has the member"),
        (packed({str(ESCAPED): b""}), "has the member"),
        (packed({"engine/a.py": b""}, link=True), "has the member"),
        (packed({"engine/a.py": b"x"}, manifest=b'{"engine/a.py": "00"}'), "another hash than its manifest"),
        (packed({"engine/a.py": b"def broken(:\n"}), "invalid syntax"),
        (Bundle("0" * 64, packed({"engine/a.py": b""}).data), "another hash than announced"),
        (Bundle("1" * 64, b"not a tar at all"), "refused the engine bundle"),
    ],
)  # fmt: skip
async def test_a_wrong_bundle_is_refused_and_leaves_nothing(
    session: Session, host: Host, bundle: Bundle, message: str
) -> None:
    with pytest.raises(RemoteError, match=message):
        await install_engine(session, bundle)
    assert folder_names(host) == []
    assert not list(host.home.rglob("escaped.py"))
    assert ESCAPED.name not in os.listdir(ESCAPED.parent)


async def test_an_id_that_is_a_path_is_refused(session: Session) -> None:
    with pytest.raises(SpecError, match="bad id"):
        await install_engine(session, Bundle("../" * 21 + "x", b"x"))


def plant_bytecode(folder: str) -> None:
    cache = Path(folder) / "engine/wire/__pycache__"
    cache.mkdir()
    (cache / "ids.cpython-311.pyc").write_bytes(b"planted")


def bytecode(folder: str) -> list[Path]:
    return list(Path(folder).rglob("*.pyc"))


async def test_calls_leave_no_bytecode_and_a_removed_engine_is_noticed(session: Session) -> None:
    installed = await install_engine(session)
    await session.call("list")
    assert bytecode(installed.dir) == []
    plant_bytecode(installed.dir)
    assert (await install_engine(session)).state == "present"
    assert bytecode(installed.dir) == []
    shutil.rmtree(installed.dir)
    with pytest.raises(Exception, match="not installed on this host"):
        await session.call("list")


def test_the_engine_runs_from_its_folder_in_an_untouched_interpreter(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys\n"
        "def main(argv):\n"
        "    print(argv, sys.flags.isolated, sys.flags.dont_write_bytecode)\n"
        "    return 7\n"
    )
    done = subprocess.run(
        engine_argv(sys.executable, str(tmp_path), "extract", "--x", "$y"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "['extract', '--x', '$y'] 1 1\n")
    assert not (package / "__pycache__").exists()
