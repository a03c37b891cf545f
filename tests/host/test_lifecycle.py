"""Starting, resuming and stopping runs with real processes: the table of deploy results."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from engine.wire.errors import LockedError, Refused, SpecError
from engine.wire.procid import ProcessId

from .support import Home, lines_of, wait_for

if TYPE_CHECKING:
    from pathlib import Path

# Notes each launch in argv[1], then waits.
SLEEPER = """
import os, sys, time
with open(sys.argv[1], "a") as f: f.write(f"{os.getpid()}\\n")
time.sleep(60)
"""

# On TERM it "flushes" and leaves with 75; its child would note a TERM of its own.
GRACEFUL = """
import os, signal, subprocess, sys, time
child = "import signal, sys, time; signal.signal(15, lambda *_: open(sys.argv[1], 'w')); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child, sys.argv[1] + ".child"])
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), os._exit(75)))
open(sys.argv[1], "w").close()
while True: time.sleep(1)
"""

# Ignores TERM and INT, and has a grandchild in a session of its own whose pid it notes.
STUBBORN = """
import os, signal, sys, time
for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
os.wait()
while True: time.sleep(1)
"""


def test_a_start_that_is_repeated_launches_once(home: Home, tmp_path: Path) -> None:
    launches = tmp_path / "launches"
    first = home.start("r1", SLEEPER, 1, str(launches))
    again = home.start("r1", SLEEPER, 1, str(launches))
    assert (first["already"], again["already"]) == (False, True)
    assert again["status"]["pid"] == first["status"]["pid"]
    wait_for(lambda: lines_of(launches))
    assert lines_of(launches) == [str(first["status"]["pid"])]


def test_starts_at_the_same_time_launch_once(home: Home, tmp_path: Path) -> None:
    launches = tmp_path / "launches"
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: home.start("r1", SLEEPER, 1, str(launches)), range(4)))
    assert sorted(a["already"] for a in answers) == [False, True, True, True]
    wait_for(lambda: lines_of(launches))
    assert len(lines_of(launches)) == 1


def test_a_start_killed_at_any_moment_and_repeated_launches_once(home: Home, tmp_path: Path) -> None:
    killed = 0
    for step in range(8):
        run, launches = f"r{step}", tmp_path / f"launches{step}"
        args: dict[str, Any] = {
            "kind": "extract",
            "argv": [sys.executable, "-I", "-c", SLEEPER, str(launches)],
            "attempt": 1,
        }
        starter = home.spawn("start", run=run, **args)
        try:
            starter.wait(0.04 + 0.015 * step)  # a fast machine may be through with the last of them
        except subprocess.TimeoutExpired:
            killed += 1
        starter.kill()
        starter.communicate()
        assert home.call("start", run=run, **args)["status"]["state"] in ("starting", "running")
        wait_for(partial(lines_of, launches))
        assert lines_of(launches) == [str(home.status(run)["pid"])]
    assert killed


def test_status_tells_the_essentials_of_a_run(home: Home, tmp_path: Path) -> None:
    program = "import json, os, time; print(json.dumps(dict(os.environ))); time.sleep(60)"
    home.env = {"HF_TOKEN": "hf_canary", "CUDA_VISIBLE_DEVICES": "0"}
    home.start("r1", program, 1, env={"MODE": "x"}, output=str(tmp_path / "out"), kind="server")
    seen = json.loads(wait_for(lambda: lines_of(home.dir("r1") / "stdio.log"))[0])
    assert seen["HSX_RUN"] == str(home.dir("r1"))
    assert (seen["MODE"], seen["CUDA_VISIBLE_DEVICES"]) == ("x", "0")
    assert "HF_TOKEN" not in seen
    status = home.call("status", run="r1")["status"]
    assert (status["state"], status["kind"], status["attempt"]) == ("running", "server", 1)
    assert status["heartbeat_age_s"] < 5
    assert status["output"] == str(tmp_path / "out")
    assert status["files"]["stdio.log"]["size"] > 0
    assert [r["run"] for r in home.call("list")["runs"]] == ["r1"]
    assert home.dir("r1").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o077 for p in home.dir("r1").iterdir()} == {0}
    assert "canary" not in (home.dir("r1") / "spec.json").read_text()


def test_the_servers_key_reaches_the_engine_and_no_file(home: Home, tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "with open(sys.argv[1], 'w') as f: f.write(repr(dict(os.environ)) + '\\n')\n"
        "time.sleep(60)"
    )
    home.env = {
        "SGLANG_API_KEY": "sk-canary",
        "OTHER_API_KEY": "sk-other",
        "HF_HOME": "/m",
        "HF_HUB_CACHE": "/c",
    }
    note = tmp_path / "note"
    home.start("r1", program, 1, str(note), spec={"source": {"api_key_env": "SGLANG_API_KEY"}})
    seen = ast.literal_eval(wait_for(lambda: lines_of(note))[0])
    assert (seen["SGLANG_API_KEY"], seen["HF_HOME"], seen["HF_HUB_CACHE"]) == ("sk-canary", "/m", "/c")
    assert "OTHER_API_KEY" not in seen
    written = [p for p in home.path.rglob("*") if p.is_file()]
    assert home.dir("r1") / "spec.json" in written
    assert not [p for p in written if b"canary" in p.read_bytes()]


@pytest.mark.parametrize("name", ["sk-canary", "", 7, "A=B"])
def test_what_is_no_name_of_a_key_is_refused_and_not_repeated(home: Home, name: object) -> None:
    with pytest.raises(SpecError, match="api_key_env") as caught:
        home.start("r1", "pass", spec={"source": {"api_key_env": name}})
    assert "canary" not in str(caught.value)
    assert not home.dir("r1").exists()


def test_the_exit_status_and_the_last_words_are_recorded(home: Home) -> None:
    home.start("r1", "raise SystemExit('no such model')")
    exit_record = home.wait_state("r1", "exited")["exit"]
    assert (exit_record["rc"], exit_record["signal"], exit_record["stage"]) == (1, None, 0)
    assert exit_record["error"] == "no such model"


def test_an_engine_killed_by_a_signal_is_recorded(home: Home, tmp_path: Path) -> None:
    home.start("r1", SLEEPER, 1, str(tmp_path / "l"))
    home.process("r1", "child.json").send(signal.SIGKILL)
    exit_record = home.wait_state("r1", "exited")["exit"]
    assert (exit_record["rc"], exit_record["signal"]) == (None, 9)


def test_a_graceful_stop_signals_the_engine_alone(home: Home, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    home.start("r1", GRACEFUL, 1, str(ready))
    wait_for(ready.exists)
    assert home.call("abort", run="r1", grace=[20, 5])["noop"] is False
    exit_record = home.wait_state("r1", "exited")["exit"]
    assert (exit_record["rc"], exit_record["stage"]) == (75, 1)
    assert not (tmp_path / "ready.child").exists()
    assert home.call("abort", run="r1")["noop"] is True


def test_a_stubborn_engine_and_its_escaped_grandchild_are_killed(home: Home, tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    home.start("r1", STUBBORN, 1, str(note))
    wait_for(lambda: lines_of(note))
    grandchild = ProcessId.of(int(note.read_text()))
    assert grandchild is not None
    home.call("abort", run="r1", grace=[0.2, 0.2])
    exit_record = home.wait_state("r1", "exited")["exit"]
    assert (exit_record["signal"], exit_record["stage"]) == (9, 3)
    assert exit_record["reaped"] >= 1
    assert not grandchild.alive()


def test_a_second_abort_may_be_less_patient(home: Home, tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    home.start("r1", STUBBORN, 1, str(note))
    wait_for(lambda: lines_of(note))
    asked = home.call("abort", run="r1", grace=[600, 600])["status"]["stop"]["at"]
    again = home.call("abort", run="r1", grace=[0.1, 0.1])["status"]["stop"]
    assert again == {"at": asked, "grace": [0.1, 0.1]}
    assert home.wait_state("r1", "exited")["exit"]["stage"] == 3


def test_an_orphan_keeps_its_output_and_can_be_stopped(home: Home, tmp_path: Path) -> None:
    ready, output = tmp_path / "ready", str(tmp_path / "out")
    home.start("r1", GRACEFUL, 1, str(ready), output=output)
    wait_for(ready.exists)
    home.kill("r1", "sup.json")
    assert home.status("r1")["state"] == "orphaned"
    with pytest.raises(LockedError, match="run r1 since"):
        home.start("r2", SLEEPER, 1, str(tmp_path / "l"), output=output)
    assert not home.dir("r2").exists()
    home.call("abort", run="r1", grace=[20, 5])
    exit_record = home.wait_state("r1", "exited")["exit"]
    assert (exit_record["rc"], exit_record["stage"]) == (None, 1)
    home.start("r2", SLEEPER, 1, str(tmp_path / "l"), output=output)


def test_a_stubborn_orphan_is_killed_with_what_it_left(home: Home, tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    home.start("r1", STUBBORN, 1, str(note))
    wait_for(lambda: lines_of(note))
    grandchild = ProcessId.of(int(note.read_text()))
    assert grandchild is not None
    home.kill("r1", "sup.json")
    home.call("abort", run="r1", grace=[0.1, 0.1])
    exit_record = home.wait_state("r1", "exited")["exit"]
    assert (exit_record["stage"], exit_record["reaped"]) == (3, 1)
    assert not grandchild.alive()


def test_supervisor_and_engine_killed_is_lost_killed_and_resumes(home: Home, tmp_path: Path) -> None:
    launches = tmp_path / "launches"
    home.start("r1", SLEEPER, 1, str(launches), output=str(tmp_path / "out"))
    home.kill("r1", "sup.json")
    home.kill("r1", "child.json")
    assert home.status("r1")["state"] == "lost-killed"
    assert home.call("abort", run="r1")["noop"] is True
    resumed = home.start("r1", SLEEPER, 2, str(launches), output=str(tmp_path / "out"))["status"]
    assert (resumed["state"], resumed["attempt"]) == ("running", 2)


def test_an_engine_that_reported_its_result_is_not_lost(home: Home, tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "open(os.environ['HSX_RUN'] + '/result.json', 'w').write('{\"done\": 3}')\n"
        "time.sleep(60)"
    )
    home.start("r1", program)
    wait_for(lambda: home.status("r1")["result"] == {"done": 3})
    home.kill("r1", "sup.json")
    home.kill("r1", "child.json")
    status = home.status("r1")
    assert (status["state"], status["exit"]) == ("exited", None)


def test_a_reused_pid_is_not_ours(home: Home, tmp_path: Path) -> None:
    home.start("r1", SLEEPER, 1, str(tmp_path / "l"))
    home.kill("r1", "sup.json")
    home.kill("r1", "child.json")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for name in ("sup.json", "child.json"):
            record = json.loads((home.dir("r1") / name).read_bytes())
            (home.dir("r1") / name).write_text(json.dumps({**record, "pid": stranger.pid}))
        assert home.status("r1")["state"] == "lost-killed"
        assert home.call("abort", run="r1")["noop"] is True
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_another_boot_is_lost_reboot(home: Home, tmp_path: Path) -> None:
    home.start("r1", SLEEPER, 1, str(tmp_path / "l"))
    supervisor, child = home.process("r1", "sup.json"), home.process("r1", "child.json")
    try:
        for name in ("sup.json", "child.json"):
            record = json.loads((home.dir("r1") / name).read_bytes())
            (home.dir("r1") / name).write_text(json.dumps({**record, "boot": "another"}))
        assert home.status("r1")["state"] == "lost-reboot"
    finally:
        supervisor.send(signal.SIGKILL)
        child.send(signal.SIGKILL)


def test_a_bad_interpreter_is_an_error_at_once(home: Home) -> None:
    with pytest.raises(Refused, match="/nowhere/python: No such file"):
        home.call("start", run="r1", attempt=1, kind="extract", argv=["/nowhere/python", "x"])
    assert home.status("r1")["exit"]["rc"] == 127
    assert (
        home.call("start", run="r1", attempt=1, kind="extract", argv=["/nowhere/python"])["already"] is True
    )


def test_a_resume_sets_the_attempt_aside_and_the_logs_go_on(home: Home) -> None:
    home.start("r1", "import sys; sys.stdout.write('torn'); raise SystemExit(3)")
    with pytest.raises(Refused, match="no attempt 2"):
        home.start("r1", "pass", 3)
    home.wait_state("r1", "exited")
    home.start("r1", "print('second'); import time; time.sleep(60)", 2)
    wait_for(lambda: len(lines_of(home.dir("r1") / "stdio.log")) == 2)
    assert lines_of(home.dir("r1") / "stdio.log") == ["torn", "second"]
    aside = home.dir("r1") / "attempts/1"
    assert json.loads((aside / "exit.json").read_bytes())["rc"] == 3
    assert {p.name for p in aside.iterdir()} == {"spec.json", "sup.json", "child.json", "exit.json"}
    status = home.status("r1")
    assert (status["state"], status["attempt"], status["exit"]) == ("running", 2, None)
    with pytest.raises(Refused, match="r1 is running"):
        home.start("r1", "pass", 3)
    assert home.start("r1", "pass", 1)["already"] is True


def test_a_crash_while_an_attempt_is_set_aside_is_mended(home: Home) -> None:
    home.start("r1", "raise SystemExit(3)")
    home.wait_state("r1", "exited")
    aside = home.dir("r1") / "attempts/1"
    aside.mkdir(parents=True, mode=0o700)
    for name in ("sup.json", "child.json", "exit.json"):
        (home.dir("r1") / name).rename(aside / name)
    assert home.status("r1")["exit"]["rc"] == 3
    assert home.start("r1", "pass", 1)["already"] is True
    assert home.start("r1", "pass", 2)["already"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "../x"}, "bad run id"),
        ({"run": "A"}, "bad run id"),
        ({"argv": ["python"]}, "absolute path"),
        ({"argv": "rm -rf"}, "bad argv"),
        ({"attempt": 0}, "bad attempt"),
        ({"kind": "shell"}, "bad kind"),
        ({"env": {"API_KEY": "x"}}, "looks like a secret"),
        ({"env": {"a b": "x"}}, "bad env"),
        ({"output": "relative"}, "absolute path"),
        ({"grace": [1]}, "bad grace"),
        ({"grace": [1, -1]}, "bad grace"),
    ],
)
def test_a_malformed_start_is_refused_and_leaves_nothing(
    home: Home, change: dict[str, object], message: str
) -> None:
    good: dict[str, Any] = {"run": "r1", "attempt": 1, "kind": "extract", "argv": [sys.executable, "-V"]}
    with pytest.raises(SpecError, match=message):
        home.call("start", **{**good, **change})
    assert list(home.path.glob(".local/state/hsx/runs/*")) == []


def test_an_unknown_verb_is_refused(home: Home) -> None:
    with pytest.raises(SpecError, match="unknown verb 'shell'"):
        home.call("shell")


def test_a_run_root_that_others_can_write_is_refused(home: Home) -> None:
    root = home.path / ".local/state/hsx"
    root.mkdir(parents=True)
    root.chmod(0o777)
    with pytest.raises(Refused, match="not a private folder"):
        home.call("list")


def test_an_output_that_cannot_be_made_is_refused_before_anything_is_written(
    home: Home, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="cannot be used"):
        home.start("r1", "pass", 1, output=str(tmp_path / "file" / "out"))
    assert not home.dir("r1").exists()
