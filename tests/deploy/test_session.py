"""Strict connections, and calls that tell success from a dead link."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import hsx_tui.deploy.session
from engine.wire.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    HostKeyError,
    HsxError,
    LinkLost,
    Refused,
    RemoteError,
    SpecError,
    UsageError,
)  # fmt: skip
from hsx_tui.deploy.bundle import install_engine
from hsx_tui.deploy.session import connect
from hsx_tui.deploy.tail import follow

from .proxy import FaultProxy
from .sshd import write_key

if TYPE_CHECKING:
    from pathlib import Path

    from hsx_tui.deploy.link import Link

    from .conftest import Host

HOSTILE = ["$(touch canary)", ";touch canary", "'\"\\", "a\nb", "\u202egnp", "%s`id`", ""]


async def test_arguments_reach_the_host_exactly_and_no_shell_sees_them(
    link: Link, host: Host, run_id: str
) -> None:
    session = await link.session()
    assert session.engine is not None
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    argv = [session.engine.python, "-I", "-c", program, *HOSTILE]
    await session.call("start", run=run_id, attempt=1, kind="extract", argv=argv)
    async for _ in follow(link.session, run_id, "stdio.log"):
        pass
    status = (await session.call("status", run=run_id))["status"]
    log = host.home / ".local/state/hsx/runs" / run_id / "stdio.log"
    assert json.loads(log.read_bytes()) == HOSTILE
    assert status["exit"]["rc"] == 0
    assert not list(host.home.rglob("canary"))


async def test_errors_of_the_host_keep_their_kind_and_their_text_is_cleaned(link: Link) -> None:
    session = await link.session()
    with pytest.raises(SpecError, match="bad run id") as caught:
        await session.call("status", run="\x1b[2J\u202e")
    assert str(caught.value).isprintable()


async def test_a_link_that_dies_during_a_call_is_not_a_success(link: Link, host: Host) -> None:
    session = await link.session()
    async with session.open("install", id="0" * 64, size=1000) as call:
        assert (await call.answer())["state"] == "send"
        host.drop()
        with pytest.raises(LinkLost, match="install"):
            await call.answer()
    assert session.lost
    with pytest.raises(LinkLost):
        await session.call("list")
    again = await link.session()
    assert again is not session
    assert "runs" in await again.call("list")


async def test_a_start_whose_answer_is_lost_is_repeated_and_launches_once(
    link: Link, host: Host, run_id: str
) -> None:
    session = await link.session()
    assert session.engine is not None
    program = "import os, time; print(os.getpid()); time.sleep(60)"
    args: dict[str, Any] = {
        "attempt": 1,
        "kind": "extract",
        "argv": [session.engine.python, "-u", "-c", program],
    }
    for step in range(4):
        run = f"{run_id}-{step}"
        starting = asyncio.create_task(link.call("start", run=run, **args))
        await asyncio.sleep(0.05 * step)
        host.drop()
        status = (await starting)["status"]
        assert status["state"] in ("starting", "running")
        await asyncio.sleep(0.2)
        log = host.home / ".local/state/hsx/runs" / run / "stdio.log"
        assert log.read_text() == f"{status['pid']}\n"
        await link.call("abort", run=run, grace=[1, 1])


async def test_many_calls_at_once_fit_a_default_sshd(link: Link) -> None:
    session = await link.session()
    answers = await asyncio.gather(*(session.call("list") for _ in range(12)))
    assert all("runs" in answer for answer in answers)


async def test_observe_streams_facts_and_ends_with_its_reader(link: Link) -> None:
    session = await link.session()
    facts = session.observe(0.1, paths=["/"])
    seen = [await anext(facts) for _ in range(3)]
    await facts.aclose()  # type: ignore[attr-defined]
    assert all(f["disks"][0]["path"] == "/" for f in seen)
    assert "runs" in await session.call("list")


async def test_too_many_streams_are_refused(link: Link) -> None:
    session = await link.session()
    streams = [session.observe(1) for _ in range(5)]
    for stream in streams[:4]:
        await anext(stream)
    with pytest.raises(Refused, match="too many streams"):
        await anext(streams[4])
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_call_has_a_deadline_and_the_session_stays_usable(link: Link) -> None:
    session = await link.session()
    with pytest.raises(DeadlineExceeded, match=r"did not answer install within 0\.5 s"):
        async with session.open("install", id="0" * 64, size=1000, deadline_s=0.5) as call:
            await call.answer()
            await call.answer()
    assert "runs" in await session.call("list")


async def test_a_call_before_the_engine_is_there_is_refused(host: Host) -> None:
    async with await connect(host.address) as session:
        with pytest.raises(Refused, match="needs the engine"):
            await session.call("list")


async def test_a_closed_session_leaves_no_tasks(host: Host) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(3):
        async with await connect(host.address) as session:
            await install_engine(session)
    await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks()) == before


async def test_a_changed_host_key_is_refused_with_both_fingerprints(host: Host, tmp_path: Path) -> None:
    other = write_key(tmp_path / "other")
    public = " ".join(other.export_public_key().decode().split()[:2])
    (tmp_path / "known").write_text(f"[127.0.0.1]:{host.address.port} {public}\n")
    with pytest.raises(HostKeyError, match=r"CHANGED.*shows SHA256:.*expected SHA256:"):
        await connect(replace(host.address, known_hosts=tmp_path / "known"))


@pytest.mark.parametrize("content", ["", None, "[127.0.0.2]:1 {key}\n"])
async def test_an_unknown_host_key_is_refused(host: Host, tmp_path: Path, content: str | None) -> None:
    known = tmp_path / "known"
    if content is not None:
        key = host.address.known_hosts.read_text().strip().split(" ", 1)[1]
        known.write_text(content.format(key=key))
    with pytest.raises(HostKeyError, match="is not known"):
        await connect(replace(host.address, known_hosts=known))


async def test_a_hostile_ssh_config_changes_nothing(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(
        f"UserKnownHostsFile none\nStrictHostKeyChecking no\n"
        f'Match exec "touch {tmp_path}/canary"\n  ProxyCommand touch {tmp_path}/canary\n'
    )
    (tmp_path / ".ssh/known_hosts").write_text(host.address.known_hosts.read_text())
    (tmp_path / "empty").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(HostKeyError):
        await connect(replace(host.address, known_hosts=tmp_path / "empty"))
    assert not (tmp_path / "canary").exists()


async def test_a_wrong_client_key_is_a_refused_login(host: Host, tmp_path: Path) -> None:
    write_key(tmp_path / "stranger")
    with pytest.raises(ConnectionFailed, match="refused the login"):
        await connect(replace(host.address, client_key=tmp_path / "stranger"))
    (tmp_path / "rubbish").write_text("rubbish")
    with pytest.raises(UsageError, match="cannot be used"):
        await connect(replace(host.address, client_key=tmp_path / "rubbish"))
    with pytest.raises(UsageError, match="cannot be read"):
        await connect(replace(host.address, client_key=tmp_path / "absent"))


async def test_nobody_listening_silence_and_another_protocol_are_told_apart(
    host: Host, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded):
            await connect(replace(host.address, port=port), deadline_s=0.5)
    with pytest.raises(ConnectionFailed, match="cannot be reached"):
        await connect(replace(host.address, port=port))

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 200)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        began = time.monotonic()
        with pytest.raises(ConnectionFailed):
            await connect(replace(host.address, port=web.sockets[0].getsockname()[1]))
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_link_that_is_dead_one_way_is_noticed(
    host: Host, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    monkeypatch.setattr(hsx_tui.deploy.session, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(hsx_tui.deploy.session, "PING_DEADLINE_S", 0.7)
    async with FaultProxy(host.address) as proxy:
        async with await connect(proxy.address(host.address.known_hosts.read_text())) as session:
            await install_engine(session)
            stream = session.observe(0.1)
            await anext(stream)
            (proxy.up_open if direction == "up" else proxy.down_open).clear()
            began = time.monotonic()
            with pytest.raises(LinkLost, match="no answer to a ping"):
                while True:
                    await anext(stream)
            assert time.monotonic() - began < 4


async def test_a_noisy_shell_is_skipped_and_an_endless_one_is_an_error(sshd_host: Host) -> None:
    rc = sshd_host.home / ".bashrc"
    rc.write_text("printf 'Welcome \\377\\n<<nonce\\n{\"ok\": true}\\n'; echo noise >&2\n")
    async with await connect(sshd_host.address) as session:
        await install_engine(session)
        assert "runs" in await session.call("list")
    rc.write_text("head -c 300000 /dev/zero | tr '\\0' 'x'\n")
    async with await connect(sshd_host.address) as session:
        with pytest.raises(RemoteError, match=r"endless line|prints too much"):
            await install_engine(session)
    rc.unlink()


LIAR = """#!{python}
import json, sys
sys.stdin.buffer.readline()
nonce = json.loads(sys.stdin.buffer.readline())["nonce"].encode()
out = sys.stdout.buffer
out.write(b"\\n<<" + nonce + b"\\n")
{lie}
"""


@pytest.mark.parametrize(
    ("lie", "error", "message"),
    [
        ("for _ in range(400): out.write(b'x' * 65536)", RemoteError, "endless line"),
        ("out.write(b'not json\\n>>' + nonce + b'\\n')", RemoteError, "not JSON"),
        ("out.write(b'[' * 200000 + b'\\n')", RemoteError, "not JSON"),
        ("out.write(b'[1]\\n')", RemoteError, "not an object"),
        ("out.write(b'{{\"ok\": true}}\\n')", RemoteError, "install failed"),
        ("out.write(b'{{\"ok\": true}}\\n>>forged\\n'); sys.exit(3)", RemoteError, "status 3"),
        ("sys.exit('\\x1b[31mbroken')", RemoteError, "status 1.*broken"),
        ('out.write(b\'{{"ok": true, "id": "x"}}\\n>>\' + nonce + b\'\\n\')', RemoteError, "another engine"),
    ],
)
async def test_a_host_that_lies_gets_an_error_and_no_more(
    sshd_host: Host, lie: str, error: type[HsxError], message: str
) -> None:
    liar = sshd_host.home / "python3"
    python = f"{__import__('sys').executable} -I"
    liar.write_text(LIAR.format(python=python, lie=lie.format()))
    liar.chmod(0o700)
    (sshd_host.home / ".bashrc").write_text(f"PATH={sshd_host.home}:$PATH\n")
    try:
        async with await connect(sshd_host.address) as session:
            with pytest.raises(error, match=message) as caught:
                await install_engine(session, deadline_s=20)
            assert str(caught.value).isprintable()
    finally:
        (sshd_host.home / ".bashrc").unlink()
        liar.unlink()
