"""Jobs on a server, each by a real supervised job on a real process."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from engine.host.servers.stopping import stop_server
from engine.wire.errors import Refused
from engine.wire.procid import ProcessId

from ..support import wait_for

if TYPE_CHECKING:
    from .conftest import Place


def test_a_started_server_is_ready_and_outlives_its_job(place: Place) -> None:
    result = place.job("start")
    assert result["outcome"] == "done"
    server = place.running()
    assert server is not None
    assert result["process"]["pid"] == server.id.pid
    wait_for(lambda: not place.home.process("job-small", "sup.json").alive())
    assert server.id.alive()
    assert place.home.status("server-small")["state"] == "running"  # its supervisor lives, too
    assert place.job("start")["outcome"] == "already"
    state = place.state()
    assert (state["ready"], state["ours"], state["usual"]["count"]) == (True, True, 1)


def test_a_restart_keeps_argv_environment_and_folder_and_writes_them_down_first(place: Place) -> None:
    before = place.by_hand(
        "--api-key", "canary-key", env={"CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "canary-t"}
    )
    result = place.job("restart", expected=before.id.to_json())
    assert (result["outcome"], result["differs"]) == ("done", [])
    after = place.running()
    assert after is not None
    assert (after.id != before.id, after.argv, after.cwd) == (True, before.argv, before.cwd)
    assert after.env == before.env
    saved = place.folder / "saved.json"
    assert json.loads(saved.read_bytes())["argv"] == list(before.argv)
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_key_is_in_no_record_but_the_description(place: Place) -> None:
    place.by_hand("--api-key", "canary-key")
    assert place.job("restart")["outcome"] == "done"
    plan, state = place.plan("restart"), place.state()
    assert "canary" not in json.dumps([plan, state])
    holders = {
        path.name
        for path in (place.home.path / ".local/state/hsx").rglob("*")
        if path.is_file() and b"canary" in path.read_bytes()
    }
    assert holders == {"saved.json", "launch.json"}


def test_a_stop_ends_it_and_a_start_without_a_launch_brings_back_what_was_saved(place: Place) -> None:
    before = place.by_hand()
    bare = place.target(launch=None)
    assert place.job("stop", server=bare)["outcome"] == "done"
    assert not before.id.alive()
    assert place.job("stop", server=bare)["outcome"] == "already"
    assert place.job("start", server=bare)["outcome"] == "done"
    after = place.running()
    assert after is not None
    assert after.argv == before.argv


def test_a_server_that_ignores_signals_is_killed(place: Place) -> None:
    before = place.by_hand("--stubborn")
    assert place.job("stop", grace=[0.2, 0.2])["outcome"] == "done"
    assert not before.id.alive()
    events = (place.home.dir("job-small") / "events.jsonl").read_text()
    assert events.index("SIGTERM") < events.index("SIGINT") < events.index("SIGKILL")


def test_nothing_is_stopped_when_its_description_cannot_be_written(place: Place) -> None:
    server = place.by_hand()
    (place.folder / "saved.json").mkdir(parents=True, mode=0o700)
    place.folder.parent.chmod(0o700)
    place.folder.chmod(0o700)
    error = place.job("restart")["error"]
    assert "cannot write its records" in error["what"]
    assert "make room" in error["next"]
    assert server.id.alive()


def test_a_server_that_changed_since_the_plan_is_left_alone_and_both_are_named(place: Place) -> None:
    server = place.by_hand()
    error = place.job("restart", expected={**server.id.to_json(), "start": 1})["error"]
    assert error["kind"] == "Refused"
    assert f"pid {server.id.pid} start 1" in error["what"]
    assert f"pid {server.id.pid} start {server.id.start}" in error["why"]
    assert server.id.alive()


@pytest.mark.parametrize("change", ["start", "model"])
def test_the_identity_is_read_again_just_before_the_signal(place: Place, change: str) -> None:
    server = place.by_hand()
    other = {
        "start": dataclasses.replace(server, id=dataclasses.replace(server.id, start=1)),
        "model": dataclasses.replace(server, model="/models/other"),
    }[change]
    with pytest.raises(Refused, match="the server changed"):
        stop_server(other, [server.id], (0.1, 0.1), lambda _text: None)
    assert server.id.alive()


def test_a_start_makes_no_second_server_beside_a_stranger(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.port)):
        error = place.job("start")["error"]
    assert (error["kind"], "in use" in error["what"]) == ("Refused", True)
    assert place.running() is None


def test_two_jobs_at_once_start_one_server(place: Place) -> None:
    place.flags = ("--load", "1")
    place.begin("start")
    wait_for(lambda: place.running() is not None)
    again = place.home.call("start", run="job-small", attempt=1, kind="server-job", argv=["/x"], spec={})
    assert again["already"] is True
    assert place.ended()["outcome"] == "done"
    assert place.running() is not None  # which also asserts that there is one only


def test_a_job_killed_between_stop_and_start_is_finished_by_the_same_verb(place: Place) -> None:
    before = place.by_hand("--stubborn")
    place.begin("restart", grace=[1.0, 30])
    journal = place.folder / "job.json"
    wait_for(lambda: journal.exists() and "stop" in json.loads(journal.read_bytes())["steps"])
    for record in ("sup.json", "child.json"):
        place.home.kill("job-small", record)
    before.id.send(signal.SIGKILL)  # the server ends while nobody works on it
    place.started[0].wait()
    assert place.plan("restart")["resumes"] is True
    result = place.job("restart")
    assert (result["outcome"], result["resumed"]) == ("done", True)
    after = place.running()
    assert after is not None
    assert after.argv == before.argv


def test_a_job_killed_while_the_server_loads_is_finished_without_a_second_server(place: Place) -> None:
    place.flags = ("--load", "2")
    place.begin("start")
    server = wait_for(place.running)
    for record in ("sup.json", "child.json"):
        place.home.kill("job-small", record)
    result = place.job("start")
    assert (result["outcome"], result["resumed"]) == ("done", True)
    assert result["process"]["pid"] == server.id.pid


@pytest.mark.parametrize(("flags", "told"), [(("--crash", "loading"), "boom"), (("--die",), "no such model")])
def test_a_crash_while_loading_is_told_at_once(place: Place, flags: tuple[str, ...], told: str) -> None:
    place.flags = flags
    began = time.monotonic()
    error = place.job("start")["error"]
    assert told in error["why"]
    assert time.monotonic() - began < 8  # the stand-in lingers for 60 s
    record = place.home.dir("server-small") / "child.json"
    child = ProcessId.from_json(json.loads(record.read_bytes()))
    assert child is not None
    child.send(signal.SIGKILL)


def test_a_death_while_serving_is_told_by_the_log_although_ready_still_answers(place: Place) -> None:
    place.flags = ("--crash", "serving")
    place.begin("start")
    state = wait_for(lambda: (s := place.state())["death"] and s)
    assert "boom" in state["death"]
    assert state["ready"] is False
    assert place.answers()


def test_a_hung_load_ends_at_its_deadline_and_the_server_is_left(place: Place) -> None:
    place.flags = ("--load", "60")
    error = place.job("start", deadline_s=1)["error"]
    assert error["kind"] == "DeadlineExceeded"
    assert "weights" in error["why"]
    server = place.running()
    assert server is not None
    loading = place.state()["loading"]
    assert (loading["phase"], loading["death"]) == ("weights", "")


def test_a_prompt_in_the_log_cannot_fake_a_death(place: Place) -> None:
    place.flags = ("--prompt", "x] Scheduler hit an exception: SIGQUIT received")
    assert place.job("start")["outcome"] == "done"


def test_restore_without_a_change_of_ours_is_refused(place: Place) -> None:
    server = place.by_hand()
    assert "nothing to be put back" in place.job("restart", restore=True)["error"]["what"]
    assert server.id.alive()


def test_a_capture_plan_shows_each_difference_and_changes_nothing(place: Place) -> None:
    server = place.by_hand()
    plan = place.plan("restart", taps=[1, 3], server=place.target(dump_dir="/dev/shm/hsx-none"))
    assert plan["refused"] is None
    assert "+ --return-aux-hidden-state-layer-ids 1 3" in plan["difference"]
    assert "+ HSX_DUMP_DIR=/dev/shm/hsx-none" in plan["difference"]
    assert any(line.startswith("+ PYTHONPATH=") for line in plan["difference"])
    assert server.id.alive()
    assert place.plan("restart", taps=[1])["refused"]["kind"] == "Refused"  # no dump_dir


def test_a_capture_server_that_does_not_capture_is_told_and_can_be_put_back(place: Place) -> None:
    before = place.by_hand()
    script = place.script.read_text().replace("args = p.parse_args()", "args, _ = p.parse_known_args()")
    place.script.write_text(script)  # takes SGLang's flags, has no plugin
    captured = place.target(dump_dir="/dev/shm/hsx-none")
    error = place.job("restart", taps=[1, 3], server=captured)["error"]
    assert "does not capture" in error["what"]
    changed = place.running()
    assert changed is not None
    assert "--enable-return-aux-hidden-states" in changed.argv
    assert place.state()["changed_by_us"] is True
    result = place.job("restart", restore=True, server=captured)
    assert (result["outcome"], result["differs"]) == ("done", [])
    after = place.running()
    assert after is not None
    assert (after.argv, after.env) == (before.argv, before.env)
    assert place.state()["changed_by_us"] is False
