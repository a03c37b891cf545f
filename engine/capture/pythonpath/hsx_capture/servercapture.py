"""What the hooks do: between SGLang's forward and the recorder. No error of it reaches a request.

Loaded inside production servers: torch late, relative imports only.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .batchrows import Forward, Rows, prefills, rows_of_ours
from .finalnorm import FinalNorm
from .folder import Limits
from .joining import Piece
from .layers import read_layers
from .recorder import CaptureFacts, Handshake, Recorder
from .traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger("hsx.capture")

KEY = "hsx"
"""Where the handshake stands in a reply's meta_info."""

TOLD = ("SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_USE_CPU_ENGINE")
"""Variables that decide how exact the states are; the beacon tells them, no others."""


class ServerCapture:
    """One scheduler process. Everything but ``end`` runs on its scheduler thread."""

    def __init__(self, folder: Path, hooks: tuple[str, ...]) -> None:
        self._folder, self._hooks = folder, hooks
        self._norm = FinalNorm()
        self._recorder: Recorder | None = None
        self._worker: Any = None
        self._hidden = 0
        self._now = threading.local()
        self._forwards = 0
        self._traffic = Traffic()

    def begin(self, worker: Any) -> None:
        """The model is loaded: begin if this rank is the one that writes. Never raises."""
        try:
            self._begin(worker)
        except Exception:
            log.exception("the capture cannot begin; the server serves without it")

    def _begin(self, worker: Any) -> None:
        if not _writes(worker):
            return
        runner = worker.model_runner
        layers = read_layers(runner.model)
        self._hidden = int(runner.model_config.hidden_size)
        facts = CaptureFacts(
            taps=layers.taps, engine_layer_ids=layers.raw, model=str(runner.server_args.model_path),
            producer=f"hsx_capture 1, sglang {_version()}", where=_ranks(), hooks=self._hooks,
            notes={
                "hidden_size": self._hidden, "layers_error": layers.error,
                "env": {name: os.environ[name] for name in TOLD if name in os.environ},
            },
        )  # fmt: skip
        recorder = Recorder(
            self._folder, facts, _limits(), norm=self._norm, news=lambda: {"traffic": self._traffic.to_json()}
        )
        recorder.start()
        self._recorder, self._worker = recorder, worker

    def before(self, worker: Any, batch: Any) -> bool:
        """Before a forward: whether there are rows of ours in it. Never raises."""
        if self._recorder is None or worker is not self._worker:
            return False
        forward = None
        try:
            if prefills(batch):
                self._traffic.note(batch)
                forward = rows_of_ours(batch)
        except Exception:
            log.exception("a batch could not be read: nothing of it is captured")
        self._now.forward = forward
        return forward is not None

    def see_ids(self, runner: Any, forward_batch: Any) -> None:
        """The ids as the model gets them, copied: the tensors are reused. Never raises."""
        forward: Forward | None = getattr(self._now, "forward", None)
        if forward is None or runner is not self._worker.model_runner:
            return
        try:
            ids = forward_batch.input_ids
            for rows in forward.ours:
                rows.seen = ids[rows.first : rows.first + rows.count].clone()
        except Exception:
            log.exception("the ids of a forward could not be read")

    def norm_input(self, norm: Any) -> Callable[[Any], None] | None:
        """A callback for the final norm's input [T, H]; None when nothing of ours is in flight."""
        forward: Forward | None = getattr(self._now, "forward", None)
        if forward is None:
            return None
        self._norm.see(norm)

        def take(states: Any) -> None:
            try:
                forward.norms += 1
                forward.norm_rows = int(states.shape[0])
                for rows in forward.ours:
                    rows.pre = states[rows.first : rows.first + rows.count].clone()
            except Exception:
                log.exception("the final norm's input could not be copied")

        return take

    def forget(self) -> None:
        """The forward failed; the server says so itself."""
        self._now.forward = None

    def after(self, result: Any) -> None:
        """After a forward: hand our rows to the recorder, put the handshakes into the reply. Never raises."""
        forward: Forward | None = self._now.forward
        self._now.forward = None
        if forward is None or self._recorder is None:
            return
        self._forwards += 1
        output = getattr(result, "logits_output", None)
        shakes: list[Handshake | None] = [None] * forward.requests
        try:
            why = self._unusable(output, forward)
            for rows in forward.ours:
                if why:
                    shakes[rows.index] = self._recorder.fail(rows.rid, rows.serial, why)
                else:
                    shakes[rows.index] = self._recorder.take(self._piece(rows, forward, output))
            if output is not None and any(shakes):
                output.customized_info = {**(output.customized_info or {}), KEY: shakes}
        except Exception:
            log.exception("a forward could not be captured")

    def _unusable(self, output: Any, forward: Forward) -> str:
        """Why the states of this forward cannot be cut; "" when they can."""
        states = getattr(output, "hidden_states", None)
        if states is None:
            return "the forward gave no hidden states: is --enable-return-aux-hidden-states set?"
        if getattr(output, "hidden_states_token_indices", None) is not None:
            return "the forward kept the states of some tokens only"
        if states.dim() != 2 or states.shape[0] < forward.total:
            return f"the forward gave states of shape {tuple(states.shape)} for {forward.total} tokens"
        assert self._recorder is not None
        width = max(len(self._recorder.facts.engine_layer_ids), 1) * self._hidden
        if states.shape[1] != width:
            return f"the states are {states.shape[1]} wide, not {width}: layers are missing or too many"
        return ""

    def _piece(self, rows: Rows, forward: Forward, output: Any) -> Piece:
        part = slice(rows.first, rows.first + rows.count)
        last = getattr(output, "last_hidden_states", None)
        no_pre = self._no_pre(rows, forward)
        batch = {"forward": self._forwards, "requests": forward.requests, "first": rows.first}
        return Piece(
            rid=rows.rid, serial=rows.serial, prompt=rows.prompt, start=rows.start,
            aux=output.hidden_states[part], last=None if last is None else last[part],
            pre=None if no_pre else rows.pre, seen=rows.seen,
            batch={**batch, "mode": forward.mode, **({"no_pre": no_pre} if no_pre else {})},
        )  # fmt: skip

    def _no_pre(self, rows: Rows, forward: Forward) -> str:
        """Why the state before the final norm cannot be given; "" when it can."""
        if forward.norms == 0:
            return (
                "the final norm's hook did not run: the model calls its norm itself, or the prefill was "
                "replayed from a CUDA graph (--cuda-graph-backend-prefill disabled)"
            )
        if forward.norms > 1:
            return f"the final norm ran {forward.norms} times in one forward (two-batch overlap?)"
        if forward.norm_rows < forward.total:
            return f"the final norm saw {forward.norm_rows} of {forward.total} rows"
        if rows.pre is None or int(rows.pre.shape[0]) != rows.count:
            return "the final norm's input could not be copied"
        return self._norm.why_not

    def died(self, error: BaseException) -> None:
        """The scheduler ends with an error: its process may linger for a minute, so say it at once."""
        if self._recorder is not None:
            self._recorder.announce(failed=f"{type(error).__name__}: {error}"[:300])

    def end(self) -> None:
        """Write what is complete."""
        if self._recorder is not None:
            self._recorder.close(30.0)


def _writes(worker: Any) -> bool:
    """One rank of each attention-DP replica writes: the first of its TP and CP group, last PP stage."""
    from sglang.srt.runtime_context import get_parallel

    p = get_parallel()
    first = p.attn_tp_rank == 0 and getattr(p, "attn_cp_rank", 0) == 0
    return bool(first and worker.pp_group.is_last_rank and not worker.is_draft_worker)


def _ranks() -> dict[str, Any]:
    from sglang.srt.runtime_context import get_parallel

    p = get_parallel()
    names = ("tp_rank", "attn_tp_rank", "attn_cp_rank", "dp_rank", "pp_rank")
    return {name: getattr(p, name, None) for name in names}


def _version() -> str:
    import sglang

    return str(sglang.__version__)


def _limits() -> Limits:
    """Bounds from the environment, in bytes, where they are set."""
    names = {"memory_bytes": "HSX_MEMORY_BYTES", "folder_bytes": "HSX_FOLDER_BYTES"}
    given = {field: os.environ[name] for field, name in names.items() if name in os.environ}
    return replace(Limits(), **{field: int(value) for field, value in given.items()})
