"""How the capture plugin gets into a SGLang server: variables and flags; nothing is installed there.

The plugin is a package with a dist-info folder on PYTHONPATH (engine/capture/pythonpath, part of the engine's
content-addressed folder). ``python -m engine plugin`` prints what this module says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import engine.capture.pythonpath

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "hsx_capture"


def plugin_folder() -> Path:
    """The folder that goes on the server's PYTHONPATH."""
    return Path(engine.capture.pythonpath.__file__).resolve().parent


def server_environment(
    base: Mapping[str, str], dump_dir: str, folder_bytes: int | None = None
) -> dict[str, str]:
    """The variables to add to a server's environment ``base``; what the user has there is kept.

    PYTHONPATH is prepended to. SGLANG_PLUGINS, a list of what may load, is appended to where it is set; where
    it is not, everything loads, and setting it would turn the user's other plugins off.
    """
    added = {
        "PYTHONPATH": ":".join([str(plugin_folder()), *filter(None, [base.get("PYTHONPATH", "")])]),
        "HSX_DUMP_DIR": dump_dir,
    }
    allowed = base.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if names and NAME not in names:
        added["SGLANG_PLUGINS"] = ",".join([*names, NAME])
    if folder_bytes is not None:
        added["HSX_FOLDER_BYTES"] = str(folder_bytes)
    return added


def server_flags(taps: Sequence[int]) -> list[str]:
    """The flags under which SGLang (0.5.23 or newer) captures the outputs of 0-based layers ``taps``.

    DFLASH only names the convention: asked id k is the output of layer k; under EAGLE3 some model files add
    one and some do not. No drafter is loaded.
    """
    return [
        "--enable-return-aux-hidden-states",
        "--speculative-algorithm",
        "DFLASH",
        "--return-aux-hidden-state-layer-ids",
        *map(str, taps),
    ]


def isolated_command(python: str, server_args: Sequence[str]) -> list[str]:
    """The argv of a server whose interpreter ignores PYTHONPATH (-E, -I): the plugin's own launcher."""
    return [python, "-E", str(plugin_folder() / NAME / "launch.py"), *server_args]
