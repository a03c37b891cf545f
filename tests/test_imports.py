"""What may not be loaded, is not loaded: proved in fresh processes, beside the static contracts."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(code: str) -> set[str]:
    """The top-level modules that are loaded after ``code``."""
    program = f"{code}\nimport sys; sys.stdout.write(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_and_usage_errors_load_no_screen_and_no_ssh() -> None:
    code = "import hsx_tui.cli as c; assert c.main(['demo', '--nonsense']) == 2; assert c.main(['fly']) == 2"
    assert not loaded(code) & {"textual", "rich", "asyncssh", "torch", "typer"}


def test_the_console_never_loads_torch() -> None:
    code = "import hsx_tui.app, hsx_tui.services.demo_driver, hsx_tui.services.headless"
    assert not loaded(code) & {"torch", "transformers", "numpy", "safetensors"}


def test_the_headless_demo_loads_no_screen() -> None:
    assert not loaded("import hsx_tui.services.headless") & {"textual", "rich"}


@pytest.mark.parametrize("room", ["engine.wire.spec", "engine.host.verbs", "engine.host.supervisor"])
def test_wire_and_host_are_standard_library(room: str) -> None:
    outside = loaded(f"import {room}") - set(sys.stdlib_module_names) - {"engine", "sitecustomize"}
    assert {m for m in outside if not m.startswith("_")} <= {"site", "distutils-precedence"}
