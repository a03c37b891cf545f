"""Commands of the engine's own folder, for an interpreter that is otherwise left as it is; and the last step
of a server's start, which puts the server in this process's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine
from engine.host.servers.description import read_description
from engine.wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LAUNCHER = (
    "import sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from engine.__main__ import main\n"
    "sys.exit(main(sys.argv[2:]))"
)
PLUGIN_S = 30.0


def engine_command(*args: str) -> list[str]:
    """The argv of ``python -m engine ARGS`` from this very engine."""
    return [sys.executable, "-I", "-B", "-c", _LAUNCHER, str(Path(engine.__file__).parent.parent), *args]


def plugin_of(env: Mapping[str, str], dump_dir: str, taps: Sequence[int]) -> dict[str, Any]:
    """``python -m engine plugin``: {"environment", "flags"} that make a server with ``env`` capture."""
    words = " ".join(map(str, taps))
    try:
        done = subprocess.run(
            engine_command("plugin", "--dump-dir", dump_dir, "--taps", words),
            env={"PATH": os.environ.get("PATH", ""), **env},
            capture_output=True,
            timeout=PLUGIN_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise Refused(
            "the capture plugin cannot be described", str(error), "deploy the engine anew"
        ) from error
    return found


def execute(path: Path) -> int:
    """Become the server that the description at ``path`` means; returns only to fail.

    The description is read here and not handed over in an argv: a key in it is in no record of the run.
    """
    found = read_description(path)
    if found is None:
        raise Refused(f"{path} describes no server", "it cannot be read", "start the server anew")
    env = {**found.env, "HSX_RUN": os.environ.get("HSX_RUN", "")}
    try:
        os.chdir(found.cwd)
        os.execvpe(found.argv[0], list(found.argv), env)
    except OSError as error:
        raise Refused(
            f"the server cannot be launched: {found.argv[0]}", str(error), "correct its command or its folder"
        ) from error
