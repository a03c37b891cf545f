"""What the server says of itself: /server_info, /model_info, /v1/loads, /metrics, with SGLang's keys and
names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine import __version__

if TYPE_CHECKING:
    from engine.demo.counts import Counts
    from engine.demo.flags import Flags
    from engine.demo.packed import Shape
    from engine.demo.scheduler import Load, Scheduler

VERSION = f"hsx-demo-{__version__}"


@dataclass
class StartupTimes:
    """Seconds of each phase of the start."""

    load_weight: float = 0.0
    kv_cache_allocation: float = 0.0
    scheduler_e2e: float = 0.0
    tokenizer_e2e: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As /server_info gives it."""
        return {**vars(self), "cuda_graph": {"prefill": 0.0, "decode": 0.0}}


@dataclass
class About:
    """Everything that the informing routes need."""

    flags: Flags
    model_path: str
    shape: Shape
    scheduler: Scheduler
    counts: Counts
    capacity_tokens: int
    started: StartupTimes
    began: float = field(default_factory=time.time)

    def server_info(self, ready: bool) -> dict[str, Any]:
        """The resolved flags, flat, and the state. ``hsx_demo`` is this server's own."""
        f, t = self.flags, self.started
        taps = list(f.taps) if f.capture else None
        settings: dict[str, Any] = {
            "model_path": self.model_path, "tokenizer_path": self.model_path,
            "served_model_name": self.model_path, "skip_tokenizer_init": True, "host": f.host, "port": f.port,
            "device": "cpu", "dtype": "float32", "attention_backend": "hsx_segmented",
            "context_length": f.context_length, "allow_auto_truncate": False,
            "chunked_prefill_size": f.chunked_prefill_size, "enable_mixed_chunk": f.mixed_chunk,
            "max_prefill_tokens": f.chunked_prefill_size, "max_running_requests": f.max_running_requests,
            "max_total_tokens": self.capacity_tokens, "disable_radix_cache": not f.prefix_cache,
            "disable_overlap_schedule": True, "tp_size": 1, "dp_size": 1, "attn_dp_size": 1, "pp_size": 1,
            "enable_dp_attention": False, "speculative_algorithm": None, "enable_return_hidden_states": False,
            "enable_return_aux_hidden_states": f.capture,
            "aux_hidden_state_capture": "dflash" if f.capture else None,
            "return_aux_hidden_state_layer_ids": taps, "enable_metrics": True, "random_seed": None,
        }  # fmt: skip
        load = self.scheduler.load()
        state = {
            **settings, "effective_max_running_requests_per_dp": f.max_running_requests,
            "last_gen_throughput": load.gen_throughput,
            "memory_usage": {
                "kvcache": round(self.capacity_tokens * self.shape.kv_bytes_per_token / (1 << 30), 3),
                "token_capacity": self.capacity_tokens,
            },
        }  # fmt: skip
        return {
            **settings, "launch_command": f.launch_command, "version": VERSION,
            "status": "ready" if ready else "starting", "max_total_num_tokens": self.capacity_tokens,
            "max_req_input_len": f.context_length - 1, "startup_time": t.to_json(), "internal_states":
            [state],
            "hsx_demo": {
                "traffic": self.counts.traffic(), "sabotage": f.sabotage, "threads": f.threads,
                "dump_dir": str(f.dump_dir) if f.capture else None, "dump_mode": f.dump_mode,
            },
        }  # fmt: skip

    def model_info(self) -> dict[str, Any]:
        """Which model it is."""
        return {
            "model_path": self.model_path, "tokenizer_path": self.model_path,
            "served_model_name": self.model_path, "is_generation": True, "weight_version": "default",
            "model_type": self.shape.model_type, "architectures": [self.shape.architecture],
            "disaggregation_mode": "null", "preferred_sampling_params": None,
        }  # fmt: skip

    def loads(self) -> dict[str, Any]:
        """How busy it is."""
        load, totals = self.scheduler.load(), self.counts.totals()
        one = {
            "dp_rank": 0, "num_running_reqs": load.running, "num_waiting_reqs": load.waiting,
            "num_total_reqs": load.running + load.waiting, "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": self.capacity_tokens, "token_usage": _usage(load),
            "gen_throughput": load.gen_throughput, "cache_hit_rate": _hit_rate(totals),
            "max_running_requests": self.flags.max_running_requests,
            "total_prefill_uncached_tokens": totals.prefilled_tokens,
            "queues": {"waiting": load.waiting, "paused": 0, "retracted": 0},
        }  # fmt: skip
        return {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "version": VERSION,
            "dp_rank_count": 1, "loads": [one],
            "aggregate": {
                "total_running_reqs": load.running, "total_waiting_reqs": load.waiting,
                "total_reqs": load.running + load.waiting, "avg_token_usage": _usage(load),
                "avg_throughput": load.gen_throughput,
            },
        }  # fmt: skip

    def metrics(self) -> str:
        """The main sglang:* numbers as Prometheus text."""
        load, t = self.scheduler.load(), self.counts.totals()
        finished = t.requests - load.running - load.waiting
        rows: list[tuple[str, str, float]] = [
            ("num_running_reqs", "gauge", load.running), ("num_queue_reqs", "gauge", load.waiting),
            ("num_retracted_reqs", "gauge", 0), ("num_paused_reqs", "gauge", 0),
            ("token_usage", "gauge", _usage(load)), ("kv_used_tokens", "gauge", load.used_tokens),
            ("max_total_num_tokens", "gauge", self.capacity_tokens),
            ("gen_throughput", "gauge", load.gen_throughput), ("cache_hit_rate", "gauge", _hit_rate(t)),
            ("startup_time_seconds", "gauge", self.started.scheduler_e2e),
            ("prompt_tokens_total", "counter", t.prompt_tokens),
            ("generation_tokens_total", "counter", t.generated_tokens),
            ("cached_tokens_total", "counter", t.cached_tokens),
            ("prefill_effective_tokens_total", "counter", t.prefilled_tokens),
            ("num_requests_total", "counter", finished), ("num_aborted_requests_total", "counter", t.aborted),
        ]  # fmt: skip
        label = f'model_name="{_escape(self.model_path)}"'
        lines = []
        for name, kind, value in rows:
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{label}}} {float(value)}"]
        lines.append("# TYPE sglang:e2e_request_latency_seconds summary")
        lines.append(f"sglang:e2e_request_latency_seconds_sum{{{label}}} {t.e2e_seconds}")
        lines.append(f"sglang:e2e_request_latency_seconds_count{{{label}}} {float(finished)}")
        lines.append("# TYPE sglang:http_requests_total counter")
        for (method, route, status), n in sorted(t.http.items()):
            tags = f'method="{_escape(method)}",endpoint="{_escape(route)}",status_code="{status}"'
            lines.append(f"sglang:http_requests_total{{{tags}}} {float(n)}")
        return "\n".join(lines) + "\n"


def _usage(load: Load) -> float:
    return load.used_tokens / max(load.capacity_tokens, 1)


def _hit_rate(totals: Any) -> float:
    seen = totals.cached_tokens + totals.prefilled_tokens
    return totals.cached_tokens / seen if seen else 0.0


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
