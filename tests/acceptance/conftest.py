"""Work directories for demos: their host and server are ended afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.cli import stop
from tests.models import smollm2, tiny_with_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a real tokenizer."""
    return tiny_with_tokenizer(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def smol_workdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A work directory whose server has SmolLM2, shared by a module's tests."""
    smollm2()
    workdir = tmp_path_factory.mktemp("smol")
    yield workdir
    stop(workdir)


@pytest.fixture(scope="module")
def tiny_workdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A work directory whose server has a tiny model, shared by a module's tests."""
    workdir = tmp_path_factory.mktemp("tiny")
    yield workdir
    stop(workdir)
