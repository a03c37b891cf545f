"""A plugin for the tests that damages the packed states inside SGLang, before the capture reads them.

``HSX_SABOTAGE`` names a folder: its file ``kind`` says shift, swap or repeat (no file: nothing is done), and
what was touched goes to ``touched.jsonl``: {"rid", "kind"}. First attempts of every third row are touched.
"""

import json
import os
from pathlib import Path


def register():
    folder = os.environ.get("HSX_SABOTAGE")
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def forward(original, runner, batch, *args, **kwargs):
        out = original(runner, batch, *args, **kwargs)
        states = getattr(out.logits_output, "hidden_states", None)
        try:
            kind = (Path(folder) / "kind").read_text().strip()
        except FileNotFoundError:
            return out
        if states is not None and batch.forward_mode.name in ("EXTEND", "MIXED"):
            out.logits_output.hidden_states = _damaged(states, batch, kind, Path(folder) / "touched.jsonl")
        return out

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward", forward, HookType.AROUND
    )


def _damaged(states, batch, kind, log):
    spans, first = [], 0
    for rid, rows in zip(batch.rids, batch.extend_seq_lens_cpu, strict=True):
        spans.append((rid, first, first + int(rows)))
        first += int(rows)
    out = states.clone()
    for i, (rid, a, b) in enumerate(spans):
        if not _is_drawn(rid) or b - a < 2:
            continue
        if kind == "shift":
            out[a:b] = states[a:b].roll(1, 0)
        elif kind == "repeat":
            out[a:b] = states[a : a + 1]
        elif len(spans) > 1:
            _, c, d = spans[(i + 1) % len(spans)]
            rows = min(b - a, d - c)
            out[a : a + rows] = states[c : c + rows]
        if not out[a:b].equal(states[a:b]):
            with log.open("a") as file:
                file.write(json.dumps({"rid": rid, "kind": kind}) + "\n")
    return out


def _is_drawn(rid):
    """hsx-<run>-<row:08d>-<attempt:02d>_"""
    parts = rid.rstrip("_").split("-")
    return rid.startswith("hsx-") and parts[-1] == "01" and int(parts[-2]) % 3 == 0
