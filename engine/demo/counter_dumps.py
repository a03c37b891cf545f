"""Counter-numbered dumps, as servers that were patched in the field write them: one folder a request and
forward.

``req_<n>/`` for the warm-up, health checks, every chunk, every decode step and everybody's requests, in the
order of one counter that begins at 0 with each process, over whatever an earlier one left there. Nothing says
whose a dump is. Files are written one by one in a thread of their own; some land long after the answer.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine.demo.attention import Segment

log = logging.getLogger("hsx.demo")

FREE_FLOOR_BYTES = 256 << 20
"""Below it nothing is written."""
MOST_BYTES = 1 << 30
"""Of this process's dumps that lie there; the oldest go."""
MOST_QUEUED_BYTES = 256 << 20
_LATE_SHARE, _SLOW_SHARE = 1 / 12, 1 / 3
_SLOW_S = 0.2
_REMEMBERED = 4096

WORDS = ("pt", "safetensors", "single", "no-meta", "no-done", "no-mode", "no-final")


@dataclass(frozen=True)
class Layout:
    """How a dump is laid out (docs/formats.md). ``meta``: a file of its own, else in the one tensor file."""

    suffix: str = "pt"
    single: bool = False
    meta: bool = True
    done: bool = True
    mode: bool = True
    final: bool = True
    ids: bool = False


def parse_layout(text: str, ids: bool) -> Layout:
    """ "pt", "safetensors", with "+single", "+no-meta", "+no-done", "+no-mode", "+no-final". Raises
    UsageError."""
    words = text.split("+")
    if set(words) - set(WORDS) or len({"pt", "safetensors"} & set(words)) != 1:
        example = "for example pt, safetensors+single or pt+no-done"
        raise UsageError(f"--dump-layout {text}", f"words are {', '.join(WORDS)}, joined by +", example)
    if "no-meta" in words and "single" not in words:
        raise UsageError(f"--dump-layout {text}", "the meta needs one file to lie in", "add +single")
    return Layout(
        "pt" if "pt" in words else "safetensors", "single" in words, "no-meta" not in words,
        "no-done" not in words, "no-mode" not in words, "no-final" not in words, ids,
    )  # fmt: skip


@dataclass(order=True)
class _Job:
    due: float
    number: int
    tensors: dict[str, torch.Tensor] = field(compare=False)
    meta: dict[str, Any] = field(compare=False)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class CounterDumps:
    """Writes ``<folder>/req_<n>/`` for everything that is forwarded.

    Args:
        taps, hidden: K taps of H; packed rows are [T, (K + 2) * H] (packed.Computed).
        late_s: one of twelve prompts lands so long after it was computed when it comes for the first time;
            0: none is late, and none is slow.
        seed: chooses which.
    """

    def __init__(
        self, folder: Path, taps: int, hidden: int, layout: Layout, late_s: float = 0.0, seed: int = 0
    ) -> None:
        self.folder, self.layout = folder, layout
        self._taps, self._hidden = taps, hidden
        self._late_s, self._seed = late_s, seed
        self._next = 0
        self._came: Counter[bytes] = Counter()
        self._wake = threading.Condition()
        self._jobs: list[_Job] = []
        self._queued = 0
        self._ended = False
        self._written: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="counter-dumps", daemon=True)

    def start(self) -> None:
        """Make the folder (0700) and begin to write. Raises OSError."""
        from engine.capture.pythonpath.hsx_capture.privatedir import open_private_dir

        os.close(open_private_dir(self.folder, create=True))
        self._thread.start()

    def take(self, segments: list[Segment], states: torch.Tensor, ids: torch.Tensor) -> None:
        """A forward was computed: a number and a dump for each request in it. On the scheduler thread."""
        mixed = len({s.prefill for s in segments}) == 2
        for s in segments:
            rows = states[s.packed].clone()
            h = self._hidden
            tensors = {f"aux_{k}": rows[:, k * h : (k + 1) * h] for k in range(self._taps)}
            if self.layout.final:
                tensors["final"] = rows[:, self._taps * h : (self._taps + 1) * h]
            meta: dict[str, Any] = {"num_tokens": s.rows}
            if self.layout.mode:
                meta["forward_mode"] = "decode" if not s.prefill else "mixed" if mixed else "extend"
            if self.layout.ids:
                meta["input_ids"] = ids[s.packed].tolist()
            self._put(_Job(time.monotonic() + self._delay(s), self._next, tensors, meta))
            self._next += 1

    def _delay(self, s: Segment) -> float:
        """Seconds until it lands; the same for the same prompts in the same order of their own coming."""
        if not self._late_s or not s.prefill:
            return 0.0
        prompt = hashlib.blake2b(
            repr((self._seed, s.start, s.request.prompt)).encode(), digest_size=8
        ).digest()
        self._came[prompt] += 1
        if len(self._came) > _REMEMBERED:
            del self._came[next(iter(self._came))]
        drawn = hashlib.blake2b(prompt + bytes([self._came[prompt] % 256]), digest_size=8).digest()
        dice = int.from_bytes(drawn, "big") / 2**64
        if dice < _LATE_SHARE:
            return self._late_s if self._came[prompt] == 1 else 0.0
        return _SLOW_S * dice if dice < _SLOW_SHARE else 0.0

    def _put(self, job: _Job) -> None:
        with self._wake:
            while self._queued > MOST_QUEUED_BYTES and not self._ended:
                self._wake.wait(0.1)  # such a patch writes within the forward: it slows the server
            heapq.heappush(self._jobs, job)
            self._queued += job.bytes
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs or (self._jobs[0].due > time.monotonic() and not self._ended):
                    if self._ended and not self._jobs:
                        return
                    self._wake.wait(max(self._jobs[0].due - time.monotonic(), 0.001) if self._jobs else None)
                job = heapq.heappop(self._jobs)
            try:
                self._write(job)
            except OSError as error:
                self._drop(job, error.strerror or str(error))
            with self._wake:
                self._queued -= job.bytes
                self._wake.notify_all()

    def _write(self, job: _Job) -> None:
        system = os.statvfs(self.folder)
        if system.f_bavail * system.f_frsize < FREE_FLOOR_BYTES:
            self._drop(job, "the file system is nearly full")
            return
        place = self.folder / f"req_{job.number}"
        place.mkdir(mode=0o700, exist_ok=True)
        layout = self.layout
        if layout.single:
            inside = {} if layout.meta else job.meta
            _file(place / f"hidden_states.{layout.suffix}", _encode(job.tensors, layout.suffix, inside))
        else:
            for name, tensor in job.tensors.items():
                _file(place / f"{name}.{layout.suffix}", _encode({name: tensor}, layout.suffix, None))
        if layout.meta:
            _file(place / "meta.json", json.dumps(job.meta).encode())
        if layout.done:
            _file(place / "done", b"")
        self._bound(job)

    def _bound(self, job: _Job) -> None:
        self._written.append((job.number, job.bytes))
        self._bytes += job.bytes
        while self._bytes > MOST_BYTES:
            number, size = self._written.popleft()
            self._bytes -= size
            shutil.rmtree(self.folder / f"req_{number}", ignore_errors=True)

    def _drop(self, job: _Job, why: str) -> None:
        self._dropped += 1
        if self._dropped in (1, 10, 100) or self._dropped % 1000 == 0:
            log.error("req_%d is not written: %s (%d so far)", job.number, why, self._dropped)

    def close(self) -> bool:
        """Write what waits, at once, and end; False when that took too long."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        self._thread.join(30.0)
        return not self._thread.is_alive()


def _file(path: Path, data: bytes) -> None:
    """Written in place, as such patches do; the modification time is new also where nothing else is."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.utime(fd)


def _encode(tensors: dict[str, torch.Tensor], suffix: str, meta: dict[str, Any] | None) -> bytes:
    """A file's bytes. ``meta`` None: one bare tensor; else by name, the meta with them."""
    import io

    import torch
    from safetensors.torch import save

    whole = {k: t.contiguous().clone() for k, t in tensors.items()}
    if suffix == "safetensors":
        strings = {k: v if isinstance(v, str) else json.dumps(v) for k, v in (meta or {}).items()}
        data: bytes = save(whole, metadata=strings or None)
        return data
    out = io.BytesIO()
    what: Any = next(iter(whole.values())) if meta is None else whole | ({"meta": meta} if meta else {})
    torch.save(what, out)
    return out.getvalue()
