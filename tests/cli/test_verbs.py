"""status, deploy, watch and run against a real host: data, talk and exit status of each."""

from __future__ import annotations

import contextlib
import io
import json
import math
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import asyncssh
import pytest

from hsx_tui.commands.output import json_object
from hsx_tui.commands.status import briefs
from hsx_tui.services.demo_config import write_config as demo_config
from hsx_tui.services.demo_options import DemoOptions

from .support import hsx, spawn, write_config

if TYPE_CHECKING:
    from pathlib import Path

    from .support import DemoHost


@pytest.fixture
def fleet(demo_host: DemoHost, tmp_path: Path) -> Path:
    """Three hosts: one that is there, one whose port is closed, one that shows another key than is known."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    good = demo_host.table()
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    known = tmp_path / "changed_hosts"
    known.write_text(f"[127.0.0.1]:{good['port']} {other}")
    tables = {
        "hosts.demo": good,
        "hosts.closed": {**good, "port": closed},
        "hosts.changed": {**good, "known_hosts": "changed_hosts"},
    }
    return write_config(tmp_path / "config.toml", tables)


class TestStatus:
    def test_all_there(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("status-run", "quarantined")
        ended = hsx("status", "--json", "--config", config)
        assert ended.code == 0
        host = ended.data["hosts"][0]
        assert (ended.data["schema_version"], host["host"], host["reachable"]) == (1, "demo", True)
        assert host["facts"]["cpus"] >= 1
        assert host["facts"]["disks"][0]["path"] == str(demo_host.workdir)
        server = host["servers"][0]
        assert (server["server"], server["ready"]) == ("small", False)
        assert "refused" in server["error"]
        run = next(r for r in host["runs"] if r["run"] == "status-run")
        assert run["kind"] == "extract"

    def test_each_that_is_not_says_why(self, fleet: Path) -> None:
        ended = hsx("--config", fleet, "status", "--json")
        assert ended.code == 3
        hosts = {host["host"]: host for host in ended.data["hosts"]}
        assert hosts["demo"]["reachable"] is True
        assert hosts["closed"]["reachable"] is False
        assert hosts["closed"]["cause"]["kind"] == "ConnectionFailed"
        assert hosts["changed"]["cause"]["kind"] == "HostKeyError"
        assert "CHANGED" in hosts["changed"]["cause"]["what"]
        assert hosts["changed"]["runs"] == []

    def test_for_people(self, fleet: Path) -> None:
        ended = hsx("status", "--config", fleet)
        assert ended.code == 3
        assert "  reachable" in ended.out
        assert ended.out.count("NOT REACHABLE") == 2
        assert hsx("status", "--config", fleet, "--host", "demo").code == 0


def test_the_configuration_that_the_demo_writes_serves_every_verb(
    demo_host: DemoHost, tmp_path: Path
) -> None:
    options = DemoOptions(workdir=demo_host.workdir, model_cache=tmp_path, samples=4)
    config = demo_config(options, "http://127.0.0.1:9", "/dev/shm/hsx-no", "/m", 4)
    ended = hsx("status", "--json", "--config", config)
    assert (ended.code, [host["host"] for host in ended.data["hosts"]]) == (0, ["demo"])
    assert options.run in {
        run["run"] for run in hsx("run", "list", "--json", "--config", config).data["runs"]
    }
    assert hsx("watch", options.run, "--config", config).code == 5  # known, not started


def test_what_a_host_may_say_instead_of_runs() -> None:
    odd = [3, None, {"run": ["x"]}, {"run": "r", "result": 7, "exit": "x", "heartbeat_age_s": math.nan}]
    found = briefs(odd)
    assert [(run["run"], run["result"], run["exit"]) for run in found] == [("r", None, None)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        json_object({"runs": found})
    assert json.loads(out.getvalue())["runs"][0]["heartbeat_age_s"] is None


def test_deploy_installs_then_verifies(config: Path) -> None:
    hsx("deploy", "demo", "--config", config)
    ended = hsx("deploy", "demo", "--json", "--config", config)
    assert (ended.code, ended.data["engine"]["state"]) == (0, "present")
    assert ended.data["engine"]["python"] == sys.executable


@pytest.mark.parametrize("host", ["closed", "changed"])
def test_a_host_that_cannot_be_reached_ends_every_verb_with_3(fleet: Path, host: str) -> None:
    at = ("--config", fleet, "--host", host)
    for verb in (
        ["watch", "r"],
        ["deploy", host],
        ["run", "list"],
        ["run", "show", "r"],
        ["run", "abort", "r"],
    ):
        ended = hsx(*verb, *at)
        assert (verb, ended.code) == (verb, 3)
        assert ("CHANGED" in ended.talk) == (host == "changed")


class TestWatch:
    def test_every_event_to_the_end(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("watched", "complete")
        ended = hsx("watch", "watched", "--jsonl", "--config", config)
        events = [json.loads(line) for line in ended.out.splitlines()]
        assert ended.code == 0
        assert [e["seq"] for e in events] == [1, 2, 3, 4, 5, 6]
        assert [events[0]["type"], events[-1]["type"]] == ["run_started", "run_finished"]
        later = hsx("watch", "watched", "--jsonl", "--after", "4", "--config", config)
        assert [json.loads(line)["seq"] for line in later.out.splitlines()] == [5, 6]

    def test_for_people_and_clean(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("watched-plain", "quarantined")
        ended = hsx("watch", "watched-plain", "--config", config)
        assert ended.code == 1
        assert "WARNING sample 81: partial_chunk, got 1283, expected 4710 (retried)" in ended.out
        assert "WARNING clear the screen" in ended.out
        assert "done 2, quarantined 0, pending 1, 1.5 samples/s, 90.0 tok/s, ETA 2 min" in ended.out
        assert "\x1b" not in ended.out + ended.talk

    def test_a_live_run_is_followed_until_it_ends(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("live", "wait")
        with spawn("watch", "live", "--jsonl", "--config", config) as watch:
            assert watch.stdout is not None
            first = [json.loads(watch.stdout.readline()) for _ in range(5)]
            assert first[-1]["type"] == "progress"
            assert watch.poll() is None
            assert hsx("run", "abort", "live", "--yes", "--config", config).code == 0
            out, talk = watch.communicate(timeout=30)
        assert json.loads(out)["outcome"] == "aborted"
        assert watch.returncode == 1
        assert "run live is exited: aborted done 2 of 3" in talk

    def test_a_reader_who_leaves_is_no_defect(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("left", "complete")
        with spawn("watch", "left", "--config", config) as watch:
            assert watch.stdout is not None
            watch.stdout.close()
            assert watch.wait(timeout=30) == 1
            assert watch.stderr is not None
            assert watch.stderr.read() == ""

    def test_runs_that_are_not_there(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("nearby", "complete")
        unknown = hsx("watch", "near-by", "--config", config)
        assert unknown.code == 2
        assert "unknown run 'near-by'" in unknown.talk
        assert "Did you mean nearby?" in unknown.talk
        never = hsx("watch", "never", "--config", config)
        assert never.code == 5
        assert "Start it with hsx-console run start never" in never.talk
        assert hsx("watch", "UPPER", "--config", config).code == 2
        assert hsx("watch", "nearby", "--after", "-1", "--config", config).code == 2


class TestRun:
    def test_abort_needs_a_yes_and_says_its_plan(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("to-abort", "wait")
        refused = hsx("run", "abort", "to-abort", "--json", "--config", config)
        assert refused.code == 5
        assert (refused.data["acted"], len(refused.data["plan"]["steps"])) == (False, 3)
        assert "ABORT THE RUN on demo" in refused.talk
        assert f"Confirm: hsx-console run abort to-abort --config {config} --yes" in refused.talk
        assert hsx("run", "show", "to-abort", "--json", "--config", config).data["status"]["stop"] is None
        done = hsx("run", "abort", "to-abort", "--yes", "--json", "--config", config)
        assert (done.code, done.data["acted"]) == (0, True)
        assert hsx("watch", "to-abort", "--config", config).code == 1
        again = hsx("run", "abort", "to-abort", "--yes", "--json", "--config", config)
        assert (again.code, again.data["acted"]) == (0, False)
        shown = hsx("run", "show", "to-abort", "--config", config)
        assert shown.out.startswith("to-abort on demo: exited aborted done 2 of 3")

    def test_read_only_in_its_order(self, demo_host: DemoHost, tmp_path: Path) -> None:
        demo_host.start("guarded", "wait")
        for name, tags in (("production", {"production": True}), ("tagged", {"read_only": True})):
            config = write_config(tmp_path / name, {"hosts.h": demo_host.table(**tags)})
            abort = ("run", "abort", "guarded", "--yes", "--config", config)
            for flags in ([], ["--read-only"], ["--read-only", "--read-write"]):
                refused = hsx(*abort, *flags)
                assert (refused.code, "was not aborted on h" in refused.talk) == (5, True)
            assert hsx("run", "show", "guarded", "--json", "--config", config).data["status"]["stop"] is None
        assert hsx(*abort, "--read-write").code == 0

    def test_list_has_the_configured_and_the_found(self, config: Path, demo_host: DemoHost) -> None:
        demo_host.start("listed", "complete")
        hsx("watch", "listed", "--config", config)
        ended = hsx("run", "list", "--json", "--config", config)
        runs = {run["run"]: run for run in ended.data["runs"]}
        assert ended.code == 0
        assert (runs["listed"]["state"], runs["listed"]["configured"]) == ("exited", False)
        assert runs["listed"]["result"]["outcome"] == "complete"
        assert (runs["never"]["state"], runs["never"]["configured"]) == ("never-started", True)
        plain = hsx("run", "list", "--config", config).out
        assert "listed" in plain
        assert "complete done 3 of 3" in plain

    def test_start_and_resume_run_the_real_engine(self, config: Path, demo_host: DemoHost) -> None:
        assert hsx("run", "resume", "broken", "--yes", "--config", config).code == 5  # never started
        begun = hsx("run", "start", "broken", "--json", "--config", config)
        assert (begun.code, begun.data["status"]["attempt"]) == (0, 1)
        spec = json.loads((demo_host.workdir / "home/.local/state/hsx/runs/broken/spec.json").read_bytes())
        assert spec["argv"][0] == sys.executable
        assert spec["spec"]["dataset"]["rows"] == [0, 4]
        assert spec["output"] == spec["spec"]["store"] == str(demo_host.workdir / "stores/broken")
        watched = hsx("watch", "broken", "--config", config)
        assert watched.code == 1
        assert "failed: cannot load the tokenizer of /nowhere/model" in watched.talk
        again = hsx("run", "start", "broken", "--config", config)
        assert again.code == 5
        assert f"hsx-console run resume broken --config {config} --yes" in again.talk
        assert hsx("run", "resume", "broken", "--config", config).code == 5  # not confirmed
        resumed = hsx("run", "resume", "broken", "--yes", "--json", "--config", config)
        assert (resumed.code, resumed.data["status"]["attempt"]) == (0, 2)

    def test_wrong_command_lines(self, config: Path) -> None:
        for argv in (
            ["run"],
            ["run", "fly"],
            ["run", "show"],
            ["run", "list", "x"],
            ["run", "start", "brokn"],
        ):
            assert (argv, hsx(*argv, "--config", config).code) == (argv, 2)
        assert "Did you mean broken?" in hsx("run", "start", "brokn", "--config", config).talk
        assert "Did you mean demo?" in hsx("status", "--host", "demos", "--config", config).talk
        assert "Did you mean demo?" in hsx("deploy", "demmo", "--config", config).talk

    def test_several_hosts_and_a_run_of_none(self, fleet: Path) -> None:
        ended = hsx("watch", "whose", "--config", fleet)
        assert ended.code == 2
        assert "name the host with --host" in ended.talk


@pytest.mark.parametrize(
    "verb", ["preflight", "window", "score", "audit", "parity", "journal", "serve", "support"]
)
def test_what_is_not_there_yet_says_so(verb: str) -> None:
    for rest in ([], ["--json"], ["start", "x", "--yes"]):
        ended = hsx(verb, *rest)
        assert (ended.code, ended.out) == (2, "")
        assert f"hsx-console {verb}: it comes with a later version" in ended.talk


@pytest.mark.parametrize("text", ["[hosts.h]\naddr = 1\n", "[hosts.h]\naddress = 'x'\n[runs.r]\n", "= 1"])
def test_errors_before_any_host_load_no_ssh_and_no_screen(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text)
    code = (
        "import sys\nfrom hsx_tui.cli import main\n"
        f"for verb in (['status', '--json'], ['run', 'list'], ['watch', 'r'], ['deploy', 'h']):\n"
        f"    assert main([*verb, '--config', {str(config)!r}]) == 2\n"
        "assert not {'asyncssh', 'textual', 'rich', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
