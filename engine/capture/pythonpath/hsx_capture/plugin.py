"""SGLang's entry point: hooks around its forward, and nothing of SGLang's own is changed.

``sglang.srt.plugins`` calls ``register`` in every process of a server. The hooks only look: whatever goes
wrong in them is written to the log and to the beacon, and the request goes on as if they were not there.

    scheduler    Scheduler.run_event_loop                   begins with the event loop, flushes at its end
                 TpModelWorker.forward_batch_generation     notes whose rows are where, takes them afterwards
                 ModelRunner.forward                        copies the ids that the forward sees
                 layer_boundary.residual.batch.final_norm   copies our rows before the norm
    HTTP server  TokenizerManager.update_request_meta_info  keeps the handshake from foreign replies

Targets were read in SGLang 0.5.23. Loaded inside production servers: torch late, relative imports only.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recorder import PREFIX
from .servercapture import KEY, ServerCapture

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

log = logging.getLogger("hsx.capture")

SCHEDULER_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
FINAL_NORM = "sglang.srt.layers.layer_boundary.residual.batch.final_norm"
META_INFO = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"

_capture: ServerCapture | None = None


def register() -> None:
    """Register the hooks that this process needs. Called by SGLang; never raises for what it is about."""
    folder = os.environ.get("HSX_DUMP_DIR")
    if not folder:
        sys.stderr.write("hsx_capture: HSX_DUMP_DIR is not set, nothing is captured\n")
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = _hooks_here()
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    if FORWARD in hooks:
        global _capture
        _capture = ServerCapture(Path(folder), tuple(hooks))


def _hooks_here() -> dict[str, Callable[..., Any]]:
    """By what the process is for: resolving a target imports it, and the detokenizer needs none of them."""
    if multiprocessing.parent_process() is None:
        return {META_INFO: _reply}
    if _called_by("run_detokenizer_process"):
        return {}
    return {SCHEDULER_LOOP: _event_loop, FORWARD: _forward, MODEL: _model, FINAL_NORM: _final_norm}


def _called_by(function: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def _event_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The model is loaded and its graphs are captured: begin; and write what waits when the loop ends."""
    if _capture is None:
        return original(scheduler, *args, **kwargs)
    _capture.begin(getattr(scheduler, "tp_worker", None))
    try:
        return original(scheduler, *args, **kwargs)
    except BaseException as error:
        _capture.died(error)
        raise
    finally:
        _capture.end()


def _forward(original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    if _capture is None or not _capture.before(worker, batch):
        return original(worker, batch, *args, **kwargs)
    try:
        result = original(worker, batch, *args, **kwargs)
    except BaseException:
        _capture.forget()
        raise
    _capture.after(result)
    return result


def _model(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if _capture is not None:
        _capture.see_ids(runner, forward_batch)
    return original(runner, forward_batch, *args, **kwargs)


def _final_norm(
    original: Callable[..., Any], hidden: Any, batch: Any, norm: Any, capture: Any = None, **kwargs: Any
) -> Any:
    """Its own ``capture`` callback gets hidden + residual, complete; the storage is borrowed."""
    compiling = sys.modules["torch"].compiler.is_compiling()  # a traced hook would be compiled with its state
    ours = _capture.norm_input(norm) if _capture is not None and not compiling else None
    if ours is None:
        return original(hidden, batch, norm, capture, **kwargs)

    def both(states: Any) -> None:
        ours(states)
        if capture is not None:
            capture(states)

    return original(hidden, batch, norm, both, **kwargs)


def _reply(
    original: Callable[..., Any], manager: Any, meta_info: Any, state: Any, info: Any, *a: Any, **k: Any
) -> Any:
    """SGLang gives every request of a batch the same keys: the handshake is only for ours."""
    if isinstance(info, dict) and KEY in info and not str(meta_info.get("id", "")).startswith(PREFIX):
        info = {key: values for key, values in info.items() if key != KEY}
    return original(manager, meta_info, state, info, *a, **k)
