"""The phases of the start, each with SGLang's log line: weights, K/V room, recorder, scheduler."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from engine import __version__
from engine.capture.pythonpath.hsx_capture.privatedir import open_private_dir
from engine.demo.info import About, StartupTimes
from engine.wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from engine.capture.pythonpath.hsx_capture.recorder import Recorder
    from engine.demo.counter_dumps import CounterDumps
    from engine.demo.flags import Flags
    from engine.demo.packed import PackedModel
    from engine.demo.sabotage import Sabotage

log = logging.getLogger("hsx.demo")

LEAST_FREE_BYTES = 256 << 20
"""What the file system of the dumps must have free at the start."""


def check_taps(flags: Flags, model: Path) -> None:
    """Compare taps and context with the model's config before anything is loaded. Raises UsageError."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
        layers, positions = int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{model} is not a model folder", f"config.json: {error}") from error
    if flags.capture and flags.taps[-1] >= layers:
        raise UsageError(
            f"tap {flags.taps[-1]}", f"the model has layers 0 to {layers - 1}", "choose other --taps"
        )
    if flags.context_length > positions:
        raise UsageError(f"--context-length {flags.context_length}", f"the model has {positions} positions")


def check_dump_dir(folder: Path) -> None:
    """Refuse to start where dumps would not be private, or have no space. Raises Refused."""
    try:
        os.close(open_private_dir(folder))
    except FileNotFoundError:
        pass  # it is made later
    except OSError as error:
        raise _unusable(folder, error) from error
    there = folder
    while not there.exists():
        there = there.parent
    system = os.statvfs(there)
    free = system.f_bavail * system.f_frsize
    if free < LEAST_FREE_BYTES:
        raise Refused(
            f"no space for dumps in {folder}",
            f"{free >> 20} MiB are free, {LEAST_FREE_BYTES >> 20} MiB are needed",
            "free some, or choose another --dump-dir",
        )


def load(flags: Flags, model_path: Path) -> tuple[About, Recorder | CounterDumps | None]:
    """Load the model and start the scheduler; what writes the dumps is closed by the caller. Raises
    HsxError."""
    times = StartupTimes()
    began = time.monotonic()
    log.info("server_args=%s", {"model_path": str(model_path), "launch_command": flags.launch_command})
    model = _load_weights(flags, model_path, times)
    capacity = flags.context_length * flags.max_running_requests
    size = capacity * model.shape.kv_bytes_per_token / 2 / (1 << 30)
    log.info(
        "KV Cache is allocated. dtype: torch.float32, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
        capacity, size, size,
    )  # fmt: skip
    log.info("Memory pool end. avail mem=%.2f GB", _available_gb())
    recorder = _recorder(flags, model, model_path)
    counter = _counter_dumps(flags, model)
    about = _scheduler(flags, model, model_path, capacity, recorder, counter, times)
    log.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, "
        "context_len=%d, available_cpu_mem=%.2f GB",
        capacity, flags.chunked_prefill_size, flags.chunked_prefill_size, flags.max_running_requests,
        flags.context_length, _available_gb(),
    )  # fmt: skip
    times.scheduler_e2e = time.monotonic() - began
    log.info(
        "Engine startup timings (s): load_weight=%.2f, kv_cache_allocation=%.2f, scheduler_e2e=%.2f",
        times.load_weight, times.kv_cache_allocation, times.scheduler_e2e,
    )  # fmt: skip
    return about, counter or recorder


def _load_weights(flags: Flags, path: Path, times: StartupTimes) -> PackedModel:
    log.info("Load weight begin. avail mem=%.2f GB", _available_gb())
    shards = sorted(path.glob("*.safetensors"))
    _shard_progress(0, len(shards), 0.0)
    began = time.monotonic()
    from safetensors import SafetensorError

    from engine.demo.packed import PackedModel, load_weights

    try:
        model = load_weights(path)
        packed = PackedModel(model, flags.taps if flags.capture else None)
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        sys.stderr.write("\n")
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"the model in {path} cannot be loaded", reason[0]) from error
    times.load_weight = time.monotonic() - began
    _shard_progress(len(shards), len(shards), times.load_weight)
    sys.stderr.write("\n")
    log.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB",
        times.load_weight, packed.shape.architecture, _available_gb(),
    )  # fmt: skip
    return packed


def _shard_progress(done: int, total: int, seconds: float) -> None:
    """SGLang's progress bar (tqdm) in its own words, with a carriage return before each state."""
    percent = 100 * done // max(total, 1)
    rate = f"{_clock(seconds)}<00:00, {done / max(seconds, 1e-9):5.2f}it/s" if done else "00:00<?, ?it/s"
    sys.stderr.write(f"\rMulti-thread loading shards: {percent:3d}% Completed | {done}/{total} [{rate}]")
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _recorder(flags: Flags, model: PackedModel, model_path: Path) -> Recorder | None:
    if not flags.capture or flags.dump_dir is None or flags.dump_mode != "rid":
        return None
    from engine.capture.pythonpath.hsx_capture.recorder import CaptureFacts, Recorder

    recorder = Recorder(
        flags.dump_dir,
        CaptureFacts(
            taps=flags.taps, engine_layer_ids=flags.taps, model=str(model_path),
            producer=f"hsx-demo {__version__}", where={"tp_rank": 0, "dp_rank": 0, "pp_rank": 0},
            hooks=("engine.demo.packed",),
        ),
        norm=model.norm,
    )  # fmt: skip
    _start(recorder, flags.dump_dir)
    return recorder


def _counter_dumps(flags: Flags, model: PackedModel) -> CounterDumps | None:
    if not flags.capture or flags.dump_dir is None or flags.dump_mode != "counter":
        return None
    from engine.demo.counter_dumps import CounterDumps, parse_layout

    layout = parse_layout(flags.dump_layout, flags.dump_ids)
    dumps = CounterDumps(
        flags.dump_dir, len(flags.taps), model.shape.hidden_size, layout, flags.dump_late_s,
        flags.sabotage_seed,
    )  # fmt: skip
    _start(dumps, flags.dump_dir)
    return dumps


def _start(writer: Recorder | CounterDumps, folder: Path) -> None:
    """Begin to write dumps. Raises Refused when the folder cannot be used."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        writer.start()
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> Refused:
    return Refused(
        f"the dump folder {folder} cannot be used", str(error.strerror or error), "choose another --dump-dir"
    )


def _sabotage(flags: Flags, hidden_size: int) -> Sabotage | None:
    if flags.sabotage is None or flags.sabotage_log is None:
        return None
    from engine.demo.sabotage import Sabotage

    return Sabotage(
        flags.sabotage, flags.sabotage_always, flags.sabotage_seed, flags.sabotage_log, hidden_size
    )


def _scheduler(
    flags: Flags, model: PackedModel, model_path: Path, capacity: int, recorder: Recorder | None,
    counter: CounterDumps | None, times: StartupTimes,
) -> About:  # fmt: skip
    from engine.demo.batching import BatchRules
    from engine.demo.counts import Counts
    from engine.demo.prefix_cache import PrefixCache
    from engine.demo.scheduler import Scheduler

    counts = Counts()
    scheduler = Scheduler(
        model,
        BatchRules(flags.chunked_prefill_size, flags.max_running_requests, flags.mixed_chunk),
        counts,
        capacity,
        PrefixCache(capacity) if flags.prefix_cache else None,
        recorder,
        _sabotage(flags, model.shape.hidden_size),
        flags.threads,
        counter,
    )
    scheduler.start()
    return About(flags, str(model_path), model.shape, scheduler, counts, capacity, times)


def _available_gb() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / (1 << 20)
    return 0.0
