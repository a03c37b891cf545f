"""A private home for each test, whose processes are ended by their records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .support import Home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    home = Home(path)
    yield home
    home.end_all()
