"""Recordings for tests and pictures: what a host says over a run, as messages with their times in seconds."""

from __future__ import annotations

import datetime
from typing import Any

from hsx_tui.model.messages import (
    Connection,
    EngineEvent,
    HostFactsSeen,
    Link,
    Message,
    RunStatusSeen,
    ServerLog,
    Step,
    StepState,
)

Recording = list[tuple[float, Message]]
BEGIN = datetime.datetime(2026, 11, 30, 12, 0, 0, tzinfo=datetime.UTC)
RUN = "demo"
ROWS = 80
TOKENS = 24_000

LOADING_LOG = (
    "[2026-11-30 12:00:00] server_args={'model_path': 'SmolLM2-135M-Instruct', 'tp_size': 1}",
    "[2026-11-30 12:00:03] Init parallel begin.",
    "[2026-11-30 12:00:03] Init parallel ends. elapsed=0.09 s",
    "[2026-11-30 12:00:04] Load weight begin. avail mem=21.09 GB",
    "Multi-thread loading shards:   0% Completed | 0/2 [00:00<?, ?it/s]\r"
    "Multi-thread loading shards:  50% Completed | 1/2 [00:02<00:02, 2.10s/it]",
)
LOADED_LOG = (
    "[2026-11-30 12:00:09] Load weight end. elapsed=5.11 s, type=LlamaForCausalLM, avail mem=21.08 GB",
    "[2026-11-30 12:00:09] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8192",
    "[2026-11-30 12:00:10] Engine startup timings (s): load_weight=5.11, kv_cache_allocation=0.89",
    "[2026-11-30 12:00:10] INFO:     Application startup complete.",
    "[2026-11-30 12:00:11] The server is fired up and ready to roll!",
)


def iso(t: float) -> str:
    """The host's time ``t`` seconds after the recording began."""
    return (BEGIN + datetime.timedelta(seconds=t)).strftime("%Y-%m-%dT%H:%M:%S.%f")[:23] + "Z"


def facts(t: float, ready: bool = True, gpus: int = 0, **more: Any) -> HostFactsSeen:
    """HostFacts of a small machine."""
    gib = 1 << 30
    return HostFactsSeen(
        {
            "at": iso(t),
            "hostname": "gpu-h200-01",
            "uptime_s": 1_036_800.0 + t,
            "load": [1.42, 1.31, 0.98],
            "cpus": 16,
            "memory": {"total": 128 * gib, "available": 81 * gib},
            "disks": [{"path": "/data/hsx", "total": 28_000 * gib, "free": 9_600 * gib, "error": None}],
            "shm": {"total": 64 * gib, "free": 52 * gib},
            "gpus": [
                {
                    "index": i, "name": "NVIDIA H200", "util": 98 - i if i < 6 else 0,
                    "mem_used_mib": 125_952, "mem_total_mib": 144_384, "power_w": 688, "temp_c": 71,
                }
                for i in range(gpus)
            ],
            "server": {
                "url": "http://127.0.0.1:30000", "ready": ready, "error": None,
                "info": {"model_path": "SmolLM2-135M-Instruct", "version": "0.5.23"},
                "loads": {
                    "loads": [
                        {
                            "num_running_reqs": 8, "num_waiting_reqs": 3, "token_usage": 0.41,
                            "gen_throughput": 41.2,
                        }
                    ]
                },
            },
            "runs": [],
            **more,
        }
    )  # fmt: skip


def status(
    t: float, state: str = "running", attempt: int = 1, ended: dict[str, Any] | None = None
) -> RunStatusSeen:
    """RunStatus of the run."""
    return RunStatusSeen(
        {
            "run": RUN, "kind": "extract", "attempt": attempt, "state": state, "pid": 4711,
            "started_at": iso(0), "heartbeat_age_s": 0.4, "exit": ended, "result": None, "stop": None,
            "output": "/data/hsx/store", "files": {}, "now": iso(t),
        }
    )  # fmt: skip


def event(seq: int, t: float, kind: str, **fields: Any) -> EngineEvent:
    """One engine event."""
    return EngineEvent(RUN, {"seq": seq, "at": iso(t), "type": kind, **fields})


def progress(
    seq: int, t: float, done: int, buffered: int = 0, quarantined: int = 0, **more: Any
) -> EngineEvent:
    """A progress event whose tokens are the same share as its samples."""
    finished = done + buffered + quarantined
    fields: dict[str, Any] = {
        "done": done, "quarantined": quarantined, "pending": ROWS - done - quarantined, "buffered": buffered,
        "tokens": TOKENS * finished // ROWS, "tokens_total": TOKENS, "samples_per_s": 1.32,
        "tok_per_s": 396.0, "req_time_s": 0.92, "eta_s": None, "bytes": 3_400_000 * finished, "errors": 2,
    }  # fmt: skip
    return event(seq, t, "progress", **{**fields, **more})


def mismatch(seq: int, t: float, row: int, cause: str, outcome: str = "retried") -> EngineEvent:
    """A dump that was refused."""
    return event(
        seq, t, "mismatch", row=row, rid=f"hsx-demo-{row:08d}-01_", attempt=1, cause=cause,
        got=1283,
        expected=4710,
        evidence={"kind": "recompute", "value": 0.41}, outcome=outcome,
    )  # fmt: skip


def connected() -> Message:
    """The link is up."""
    return Connection(Link.CONNECTED, host="gpu-h200-01", rtt_ms=23.0)


def loading() -> Recording:
    """The server is half way through its weights."""
    return [
        (0.0, Step("embedded host", StepState.DONE, "listening on 127.0.0.1:40022")),
        (0.0, Step("engine installed", StepState.DONE, "3f9a2b")),
        (0.0, Step("server loading", StepState.ACTIVE, "SmolLM2-135M-Instruct")),
        (0.0, Step("dataset", StepState.PENDING)),
        (0.0, Step("run", StepState.PENDING)),
        (0.0, connected()),
        (0.0, facts(0.0, ready=False)),
        (0.0, ServerLog(LOADING_LOG)),
    ]


def running(seconds: int = 30, gpus: int = 0) -> Recording:
    """A run that is under way, a row a second, with two mismatches."""
    found: Recording = [
        (0.0, connected()),
        (0.0, ServerLog((*LOADING_LOG, *LOADED_LOG))),
        (0.0, facts(0.0, gpus=gpus)),
        (0.0, status(0.0)),
        (0.0, event(1, 0.0, "run_started", attempt=1)),
        (0.0, event(2, 0.0, "phase", name="extract")),
    ]
    seq = 3
    for second in range(seconds):
        t = float(second)
        found.append((t, progress(seq, t, done=second // 8 * 8, buffered=second % 8)))
        line = f"[{second}] 1 extracted ({second} total), 1.00 samples/s, 300 tok/s, req_time=0.9s, errors: 0"
        found.append((t, ServerLog([line], "engine")))
        seq += 1
        if second in (7, 12):
            found.append((t, mismatch(seq, t, second, "swapped" if second == 7 else "stale")))
            found.append(
                (t, ServerLog([f"WARNING sample {second}: got 1283 tokens, expected 4710"], "engine"))
            )
            seq += 1
        if second % 2 == 0:
            found.append((t, facts(t, gpus=gpus)))
            found.append((t, status(t)))
    return found
