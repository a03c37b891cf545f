"""Jobs on a server that computes: the demo's, with a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.demo.tiny import make_tiny
from engine.host.servers.program import engine_command

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Place


def test_the_demos_server_is_started_followed_and_stopped(place: Place, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = make_tiny(tmp_path / "model")
    launch = engine_command("demo", "serve", "--model", str(model), "--port", "0", "--no-capture")
    server = place.target(launch=launch)
    result = place.job("start", server=server, deadline_s=90)
    assert result["outcome"] == "done", result
    first = place.state(launch=launch)
    assert (first["ready"], first["ours"], first["death"]) == (True, True, "")
    assert first["info"]["model_path"] == str(model)
    assert first["process"]["argv"] == [*launch, "--port", str(place.port)]
    assert "weights" in first["usual"]["phases"]

    assert place.job("stop", server=server)["outcome"] == "done"
    assert place.home.status("server-small")["state"] == "exited"
    assert place.state(launch=launch)["process"] is None
