"""Servers found in /proc: the parsers on what kernels write, and a real process of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from engine.host.processes import (
    find_servers,
    parse_argv,
    parse_environ,
    parse_stat,
    parse_unit,
    server_process,
)
from engine.host.servers.command import MASK, allowed_env, flag, is_launch, masked, model_of, port_of
from engine.wire.procid import ProcessId

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = "/srv/venv/bin/python"
LAUNCH = [PYTHON, "-m", "sglang.launch_server", "--model-path", "/m/llama"]


@pytest.mark.parametrize(
    "argv",
    [
        LAUNCH,
        [PYTHON, "-E", "-m", "sglang.launch_server"],
        [PYTHON, "/srv/venv/bin/sglang", "serve", "--model-path", "/m"],
        ["sglang", "serve"],
        [PYTHON, "-E", "/e/engine/capture/pythonpath/hsx_capture/launch.py", "--port", "1"],
        [PYTHON, "-I", "-B", "-c", "import sys", "/e", "demo", "serve", "--port", "0"],
    ],
)
def test_a_launch_is_recognised(argv: list[str]) -> None:
    assert is_launch(argv)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["bash", "-c", "python -m sglang.launch_server --port 1"],
        [
            PYTHON,
            "-c",
            "from multiprocessing.spawn import spawn_main; spawn_main()",
            "--multiprocessing-fork",
        ],
        ["sglang::scheduler_TP0"],
        ["grep", "sglang.launch_server"],
        ["vim", "sglang"],
    ],
)
def test_what_only_names_a_launch_is_none(argv: list[str]) -> None:
    assert not is_launch(argv)


def test_port_and_model_are_the_last_given_in_either_form() -> None:
    assert (port_of(LAUNCH), model_of(LAUNCH)) == (30000, "/m/llama")
    argv = [*LAUNCH, "--port", "1", "--port=8123", "--model=/m/other"]
    assert (port_of(argv), model_of(argv)) == (8123, "/m/other")
    assert port_of([*LAUNCH, "--port", "x;y"]) == 30000
    assert flag(["a", "--port"], "--port") is None


def test_no_secret_of_an_argv_is_shown() -> None:
    argv = [
        *LAUNCH,
        "--api-key",
        "canary-1",
        "--admin-api-key=canary-2",
        "--x",
        "hf_canary3333",
        "--port",
        "1",
    ]
    shown = masked(argv)
    assert "canary" not in " ".join(shown)
    assert shown == [*LAUNCH, "--api-key", MASK, f"--admin-api-key={MASK}", "--x", MASK, "--port", "1"]


def test_no_secret_of_an_environment_is_kept() -> None:
    env = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_HOME": "/hf",
        "HF_TOKEN": "canary",
        "SGLANG_API_KEY": "canary",
        "NCCL_X": "sk-canary1234",
        "MY_OWN": "1",
    }
    assert allowed_env(env) == {"CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/hf"}


def test_a_name_with_parentheses_does_not_shift_the_fields_of_stat() -> None:
    rest = b" ".join([b"S", b"7", *[b"0"] * 17, b"4242", b"0"])
    stat = parse_stat(b"12 (a) b (c)) " + rest)
    assert stat is not None
    assert (stat.state, stat.parent, stat.start) == ("S", 7, 4242)
    assert parse_stat(b"") is None
    assert parse_stat(b"12 (a) S 1") is None


def test_argv_and_environ_are_split_at_nul() -> None:
    assert parse_argv(b"a\0b c\0\0") == ("a", "b c", "")
    assert parse_argv(b"") == ()
    assert parse_environ(b"A=1\0B=x=y\0junk\0") == {"A": "1", "B": "x=y"}


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/sglang.service\n", "sglang.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service\n", "llm.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n", None),
        ("12:pids:/docker/0123\n1:name=systemd:/docker/0123\n", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process(cgroup: str, unit: str | None) -> None:
    assert parse_unit(cgroup) == unit


PROGRAM = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint(flush=True)\ntime.sleep(60)\n"


def test_a_real_server_is_found_with_its_workers_and_without_its_secrets(tmp_path: Path) -> None:
    script = tmp_path / "hsx_capture" / "launch.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    argv = [
        sys.executable,
        "hsx_capture/launch.py",
        "--port",
        "31999",
        "--model",
        "/m",
        "--api-key",
        "canary",
    ]
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "canary"}
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        (found,) = [s for s in find_servers() if s.id.pid == process.pid]
        assert found.id == ProcessId.of(process.pid)
        assert (found.uid, found.port, found.model, found.cwd) == (os.getuid(), 31999, "/m", str(tmp_path))
        assert (found.interpreter, found.container) == (sys.executable, False)
        assert len(found.children) == 1  # a fork with the same argv is no server of its own
        assert os.getpid() in found.parents
        assert found.started_at == pytest.approx(time.time(), abs=30)
        assert found.env is not None
        assert found.env["CUDA_VISIBLE_DEVICES"] == "3"
        assert "canary" not in json.dumps(found.to_json())
        assert found.argv == tuple(argv)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()
    assert server_process(process.pid) is None


@pytest.mark.parametrize(("mount", "container"), [("mount -t tmpfs tmpfs /dev/shm", True), ("true", False)])
def test_a_server_with_a_dev_shm_of_its_own_is_in_a_container(
    tmp_path: Path, mount: str, container: bool
) -> None:
    script = tmp_path / "hsx_capture" / "launch.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-U", "-r", "--mount"]
    command = [*unshare, "/bin/sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        found = server_process(process.pid)
        assert found is not None
        assert found.container is container
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()
