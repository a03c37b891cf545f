"""The embedded host: started once, found again, private, and gone when asked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.wire.errors import HsxError, Refused
from engine.wire.procid import ProcessId
from hsx_tui.deploy.connecting import open_connection
from hsx_tui.deploy.embedded import ensure_host, read_host, stop_host
from hsx_tui.deploy.session import connect

from ..host.support import on_small_disk, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def workdir(tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "work"
    yield path
    if path.is_dir():
        await stop_host(path)


def noted(path: Path) -> ProcessId:
    """The process that notes its pid in ``path``, once it has."""
    process = ProcessId.of(int(wait_for(lambda: path.exists() and path.read_text().strip())))
    assert process is not None
    return process


def modes_below(folder: Path) -> dict[str, int]:
    """The permission bits of everything in ``folder``."""
    return {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o777 for p in folder.rglob("*")}


def pid_of(workdir: Path) -> int:
    record = read_host(workdir)
    assert record is not None
    pid: int = record["pid"]
    return pid


CONSOLE = """
import asyncio, pathlib, sys
from hsx_tui.deploy.embedded import ensure_host
print(asyncio.run(ensure_host(pathlib.Path(sys.argv[1]))).port)
"""


async def test_two_consoles_at_once_start_one_host(workdir: Path) -> None:
    argv = [sys.executable, "-c", CONSOLE, str(workdir)]
    pipe = asyncio.subprocess.PIPE
    consoles = [await asyncio.create_subprocess_exec(*argv, stdout=pipe) for _ in range(3)]
    ports = {(await console.communicate())[0] for console in consoles}
    assert len(ports) == 1
    assert all(c.returncode == 0 for c in consoles)
    # The consoles that started it are gone; it is not.
    assert (await ensure_host(workdir)).port == int(ports.pop())
    assert (workdir / "host.log").read_text() == ""


async def test_it_ends_when_asked_and_comes_back_on_the_same_port(workdir: Path) -> None:
    first = await ensure_host(workdir)
    pid = pid_of(workdir)
    assert await stop_host(workdir) is True
    assert ProcessId.of(pid) is None
    assert read_host(workdir) is None
    assert await stop_host(workdir) is False
    again = await ensure_host(workdir)
    assert again == first
    async with await connect(again):
        assert pid_of(workdir) != pid


async def test_a_port_that_was_taken_meanwhile_is_replaced(workdir: Path) -> None:
    first = await ensure_host(workdir)
    await stop_host(workdir)
    with socket.create_server(("127.0.0.1", first.port), reuse_port=False):
        again = await ensure_host(workdir)
        assert again.port != first.port
        async with await connect(again):
            pass


async def test_a_killed_host_and_a_reused_pid_are_no_host(workdir: Path) -> None:
    await ensure_host(workdir)
    process = ProcessId.from_json(read_host(workdir))
    assert process is not None
    process.send(signal.SIGKILL)
    wait_for(lambda: not process.alive())
    record = json.loads((workdir / "host.json").read_bytes())
    (workdir / "host.json").write_text(json.dumps({**record, "pid": os.getpid()}))
    assert read_host(workdir) is None
    async with await connect(await ensure_host(workdir)):
        assert pid_of(workdir) not in (process.pid, os.getpid())


async def test_everything_in_the_work_directory_is_private(workdir: Path) -> None:
    await ensure_host(workdir)
    modes = modes_below(workdir)
    assert {mode & 0o077 for mode in modes.values()} == {0}
    assert modes["keys/host_ed25519"] == modes["keys/client_ed25519"] == 0o600
    with socket.socket() as probe:
        address = await ensure_host(workdir)
        assert probe.connect_ex(("127.0.0.2", address.port)) != 0


async def test_a_dropped_connection_ends_its_helper_and_no_detached_process(workdir: Path) -> None:
    address = await ensure_host(workdir)
    conn = await open_connection(address, 10)
    noting = "echo $$ > {0}; exec cat"
    process = await conn.create_process(noting.format("helper"), encoding=None)
    detached = await conn.run(
        "setsid sh -c 'echo $$ > detached; exec sleep 60' </dev/null >/dev/null 2>&1 &", encoding=None
    )
    assert detached.exit_status == 0
    helper = await asyncio.to_thread(noted, workdir / "home/helper")
    lasting = await asyncio.to_thread(noted, workdir / "home/detached")
    os.kill(pid_of(workdir), signal.SIGUSR1)
    await conn.wait_closed()
    assert process.exit_status is None
    await asyncio.to_thread(wait_for, lambda: not helper.alive())
    assert lasting.alive()
    lasting.send(signal.SIGKILL)


async def test_a_writer_without_a_reader_is_ended_as_by_sshd(workdir: Path) -> None:
    conn = await open_connection(await ensure_host(workdir), 10)
    await conn.create_process("echo $$ > pid; exec yes", encoding=None, stdin=asyncio.subprocess.DEVNULL)
    writer = await asyncio.to_thread(noted, workdir / "home/pid")
    conn.abort()
    await asyncio.to_thread(wait_for, lambda: not writer.alive())


async def test_much_data_passes_both_ways_unchanged(workdir: Path) -> None:
    conn = await open_connection(await ensure_host(workdir), 10)
    data = os.urandom(1 << 20) * 12
    result = await conn.run("cat", input=data, encoding=None)
    assert isinstance(result.stdout, bytes)
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    ended = await conn.run("echo out; echo err >&2; exit 7", encoding=None)
    assert (ended.stdout, ended.stderr, ended.exit_status) == (b"out\n", b"err\n", 7)
    killed = await conn.run("kill -9 $$", encoding=None)
    assert killed.exit_signal is not None and killed.exit_signal[0] == "KILL"
    python = await conn.run("command -v python3; pwd; umask", encoding=None)
    assert python.stdout == f"{Path(sys.executable).parent}/python3\n{workdir}/home\n0077\n".encode()
    conn.close()
    await conn.wait_closed()


async def test_work_directories_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="cannot be made"):
        await ensure_host(tmp_path / "file" / "work")
    with pytest.raises(Refused, match=r"cannot be made|cannot be written"):
        await ensure_host(Path("/proc/hsx"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Refused, match="is not private"):
        await ensure_host(tmp_path / "open")
    if os.geteuid() != 0:
        foreign = Path("/")
    else:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
    with pytest.raises(Refused, match="is not ours"):
        await ensure_host(foreign)


async def test_damaged_keys_are_an_error_and_not_a_hang(workdir: Path) -> None:
    await ensure_host(workdir)
    await stop_host(workdir)
    (workdir / "keys/host_ed25519").write_text("rubbish")
    with pytest.raises(HsxError, match="embedded host"):
        await ensure_host(workdir)
    shutil.rmtree(workdir / "keys")
    await ensure_host(workdir)


FULL = """
import asyncio, json, pathlib, sys
from hsx_tui.deploy.embedded import ensure_host
work = pathlib.Path(sys.argv[1]) / "work"
with open(sys.argv[1] + "/filler", "wb", buffering=0) as filler:
    try:
        while True: filler.write(bytes(4096))
    except OSError: pass
try:
    asyncio.run(ensure_host(work))
    print(json.dumps({"error": None}))
except Exception as error:
    keys = [str(p) for p in work.rglob("*_ed25519*")]
    print(json.dumps({"error": f"{type(error).__name__}: {error}", "keys": keys}))
"""


async def test_no_space_in_the_work_directory_is_refused_and_leaves_no_half_key(tmp_path: Path) -> None:
    told = await asyncio.to_thread(on_small_disk, tmp_path, 64, [sys.executable, "-c", FULL, str(tmp_path)])
    assert told["error"].startswith("Refused: no space in the work directory")
    assert told["keys"] == []
