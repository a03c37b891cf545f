"""What a host says of itself, with a real HTTP server beside it."""

from __future__ import annotations

import json
import socket
import stat
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

import engine.host.facts
from engine.host.facts import disk, host_facts, parse_nvidia_smi
from engine.host.server import server_facts
from engine.wire.errors import SpecError

from .support import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .support import Home


class _Answers(BaseHTTPRequestHandler):
    pages: dict[str, tuple[int, bytes]]

    def do_GET(self) -> None:
        status, body = self.pages.get(self.path, (404, b""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


Pages = dict[str, tuple[int, bytes]]


@pytest.fixture
def server() -> Iterator[tuple[str, Pages]]:
    """(url, pages to be filled)."""
    pages: Pages = {}
    handler = type("Handler", (_Answers,), {"pages": pages})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", pages
        http.shutdown()
        thread.join()


def test_facts_have_every_part(home: Home, tmp_path: Path) -> None:
    facts = home.call("probe", paths=[str(tmp_path / "not" / "there")], runs=["r1"])["facts"]
    parts = "at hostname uptime_s boot_id load cpus memory disks shm gpus server runs"
    assert set(facts) == set(parts.split())
    assert facts["uptime_s"] > 0
    assert 0 < facts["memory"]["available"] < facts["memory"]["total"]
    assert facts["disks"][0]["free"] > 0
    assert facts["disks"][0]["error"] is None
    assert facts["runs"][0]["state"] == "never-started"
    assert facts["server"] is None


def test_observe_sends_a_line_each_interval_and_leaves_with_the_console(home: Home) -> None:
    process = home.spawn("observe", interval_s=0.2)
    assert process.stdout is not None and process.stdin is not None
    began = time.monotonic()
    lines = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert 0.35 < time.monotonic() - began < 5
    assert len({line["at"] for line in lines}) == 3
    process.communicate(timeout=5)
    assert process.returncode == 0


def test_a_loading_server_is_not_ready_and_a_ready_one_tells_its_load(
    server: tuple[str, Pages],
) -> None:
    url, pages = server
    pages["/ready"] = (503, b"")
    loading = server_facts(url)
    assert (loading["ready"], loading["info"], loading["error"]) == (False, None, "/ready answered 503")
    pages.update(
        {"/ready": (200, b""), "/v1/loads": (200, b'{"loads": []}'), "/server_info": (200, b"[not json")}
    )
    assert server_facts(url) == {
        "url": url,
        "ready": True,
        "loads": {"loads": []},
        "info": None,
        "error": None,
    }


def test_a_proxy_of_the_login_is_not_used(server: tuple[str, Pages], monkeypatch: pytest.MonkeyPatch) -> None:
    url, pages = server
    pages["/ready"] = (200, b"")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert server_facts(url)["ready"] is True


def test_a_server_that_is_not_there_or_silent_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        facts = server_facts(f"http://127.0.0.1:{port}")
        assert facts["ready"] is False
        assert "timed out" in facts["error"]
        assert time.monotonic() - began < 5
    assert "refused" in server_facts(f"http://127.0.0.1:{port}")["error"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x", "x"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match="bad url"):
        server_facts(url)


def test_nvidia_smi_lines_are_read_and_odd_ones_left_out() -> None:
    output = (
        "0, NVIDIA H100, 98, 71000, 81559, 650.12, 61\n"
        "No devices\n"
        "1, NVIDIA H100, [N/A], 1, 81559, [N/A], 30\n"
    )
    first, second = parse_nvidia_smi(output)
    assert first == {
        "index": 0, "name": "NVIDIA H100", "util": 98.0, "mem_used_mib": 71000.0, "mem_total_mib": 81559.0,
        "power_w": 650.12, "temp_c": 61.0,
    }  # fmt: skip
    assert (second["index"], second["util"], second["power_w"]) == (1, None, None)


def test_a_hanging_nvidia_smi_costs_its_deadline_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(engine.host.facts, "NVIDIA_SMI_S", 0.3)
    began = time.monotonic()
    assert host_facts(None, [], [])["gpus"] == []
    assert time.monotonic() - began < 3


def test_the_disk_of_a_path_that_is_not_there_is_its_parents(tmp_path: Path) -> None:
    assert disk(str(tmp_path / "a" / "b"))["total"] == disk(str(tmp_path))["total"]


# Traced by a process that does not collect it: SIGKILL ends it, but its parent cannot reap it, as with one
# that hangs in a driver.
UNKILLABLE = """#!{python} -IBS
import ctypes, os, time
child = os.fork()
if child == 0:
    os.setsid()
    libc = ctypes.CDLL(None)
    if libc.ptrace(0x4206, os.getppid(), None, None) == 0:  # PTRACE_SEIZE
        open({ready!r}, "w").close()
    time.sleep(3)
    os._exit(0)
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(child), 0, 0, 0)  # PR_SET_PTRACER, where Yama asks for it
time.sleep(60)
"""


def test_an_nvidia_smi_that_does_not_die_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    program = tmp_path / "nvidia-smi"
    program.write_text(UNKILLABLE.format(python=sys.executable, ready=str(ready)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engine.host.facts, "NVIDIA_SMI_S", 0.7)
    monkeypatch.setattr(engine.host.facts, "KILLED_S", 0.2)
    began = time.monotonic()
    assert host_facts(None, [], [])["gpus"] == []
    assert time.monotonic() - began < 1.5
    assert ready.exists(), "this test needs ptrace"
    assert len(engine.host.facts._stuck) == 1
    began = time.monotonic()
    assert host_facts(None, [], [])["gpus"] == []  # no second one is started
    assert time.monotonic() - began < 0.3
    wait_for(lambda: engine.host.facts._stuck[0].poll() is not None)
    program.write_text("#!/bin/sh\necho '0, H200, 3, 10, 20, 100.0, 40'\n")
    assert [gpu["name"] for gpu in host_facts(None, [], [])["gpus"]] == ["H200"]
    assert engine.host.facts._stuck == []
