"""The command line of the server: every error is one line with its exit code, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from engine.__main__ import main
from engine.demo.flags import parse_flags
from engine.wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def serve(*argv: str, **environment: str) -> tuple[int, str]:
    """Run the server to its end: exit code, stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "engine", "demo", "serve", *argv],
        capture_output=True, text=True, timeout=100, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nonsense"], "--nonsense"),
        (["--dump-dir", "d", "--taps", "3 1"], "ascending"),
        (["--dump-dir", "d", "--taps", "one"], "--taps 'one'"),
        (["--dump-dir", "d", "--taps", ""], "--taps ''"),
        (["--dump-dir", "d", "--host", "0.0.0.0"], "127.0.0.1 only"),
        (["--dump-dir", "d", "--port", "70000"], "--port 70000"),
        (["--dump-dir", "d", "--threads", "0"], "--threads 0"),
        (["--dump-dir", "d", "--chunked-prefill-size", "-1"], "--chunked-prefill-size -1"),
        ([], "--dump-dir is missing"),
        (["--dump-dir", "d", "--sabotage", "burn"], "swap, shift, neighbour, stale"),
        (["--dump-dir", "d", "--sabotage", "swap:sometimes"], "swap:sometimes"),
        (["--no-capture", "--sabotage", "swap"], "nothing to corrupt"),
        (["--dump-dir", "d", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_bad_flag_is_a_usage_error(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as error:
        parse_flags(argv)
    assert text in str(error.value)
    assert main(["demo", "serve", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("engine: ") and err.count("\n") == 1


def test_taps_and_context_are_compared_with_the_model(tiny: Path, tmp_path: Path) -> None:
    code, err = serve("--model", str(tiny), "--dump-dir", str(tmp_path / "d"), "--taps", "1 6")
    assert code == 2 and err == "engine: tap 6: the model has layers 0 to 5. Choose other --taps\n"
    code, err = serve(
        "--model", str(tiny), "--dump-dir", str(tmp_path / "d"), "--taps", "1", "--context-length", "9000"
    )
    assert code == 2 and "8192 positions" in err
    assert not (tmp_path / "d").exists()


def test_a_damaged_model_is_one_line(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:5000])
    code, err = serve("--model", str(broken), "--dump-dir", str(tmp_path / "d"), "--taps", "1")
    assert code == 2
    assert "Traceback" not in err and err.splitlines()[-1].startswith(
        f"engine: the model in {broken} cannot be loaded"
    )


def test_a_dump_folder_that_others_can_read_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o755)
    code, err = serve("--model", str(tiny), "--dump-dir", str(folder), "--taps", "1")
    assert code == 5 and "mode 700" in err.splitlines()[-1] and "Traceback" not in err
    assert list(folder.iterdir()) == []


def test_no_space_is_refused_before_loading(tmp_path: Path) -> None:
    from engine.demo import loading

    with pytest.raises(Refused, match="no space for dumps"):
        original = loading.LEAST_FREE_BYTES
        try:
            loading.LEAST_FREE_BYTES = 1 << 60
            loading.check_dump_dir(tmp_path / "not" / "yet" / "there")
        finally:
            loading.LEAST_FREE_BYTES = original
    assert list(tmp_path.iterdir()) == []
