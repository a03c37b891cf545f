"""The recorder: takes the hidden states of our requests from a server's forward passes and writes a dump for
each.

The same code is used by the embedded server and inside SGLang; it knows neither. On the forward thread it
only copies rows and does sums; joining, checking, hashing and writing happen in one background thread. Memory
and the folder are bounded; what finds no room is refused with a reason. No error of it ever reaches a
request.

Loaded inside production servers: standard library, torch and safetensors (late), relative imports only.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .beacon import remove_beacon, remove_leftovers, write_beacon
from .dumpfile import dump_path, is_name, write_error
from .folder import DumpFolder, Limits
from .hostcopy import HostCopier
from .joining import Partial, Piece
from .writing import Finished, build_dump

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

log = logging.getLogger("hsx.capture")

PREFIX = "hsx-"
NEWS_S = 2.0
"""How often the beacon is written anew, where there is news."""

IDLE_S = 60.0
"""A chunked prefill goes on at every turn of the scheduler: one that did not for so long gives way to others
when memory is full."""

REMEMBERED = 4096
"""How many finished requests are remembered, so that a request taken back after its prefill is not dumped
twice."""

Handshake = dict[str, Any]
"""What the reply says of the dump: {"path", "num_tokens", "dump_id", "taps", "engine_layer_ids"}; or
{"error"}, with "busy" when there was no room for it now: it may be asked again."""


@dataclass(frozen=True)
class CaptureFacts:
    """What every dump of a recorder says.

    Attributes:
        taps: outputs of 0-based decoder layers, in the order of aux's column blocks.
        engine_layer_ids: the same layers as the server numbers them.
        producer: program and version; where: ranks; hooks: what was hooked (for the beacon).
        notes: what else the beacon says.
    """

    taps: tuple[int, ...]
    engine_layer_ids: tuple[int, ...]
    model: str
    producer: str
    where: Mapping[str, Any] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stats:
    """What a recorder did since it began."""

    written: int = 0
    marked_bad: int = 0
    refused: int = 0
    failed: int = 0
    aged_out: int = 0


class Recorder:
    """Writes ``<folder>/<rid>.safetensors`` for each request of ours.

    Args:
        norm: the model's final norm; with it, norm(pre) == last is checked on the writer thread.
        clock: seconds, monotonic (tests).
        news: what the beacon says besides, asked every few seconds.
    """

    def __init__(
        self,
        folder: Path,
        facts: CaptureFacts,
        limits: Limits | None = None,
        norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
        clock: Callable[[], float] = time.monotonic,
        news: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.facts = facts
        self._limits = limits or Limits()
        self._folder = DumpFolder(folder.absolute(), self._limits)
        self._norm = norm
        self._clock = clock
        self._news = news
        self._told: Mapping[str, Any] = {}
        self._said: dict[str, Any] = {}
        self._told_at = float("-inf")
        self._copier = HostCopier()
        self._lock = threading.Lock()
        self._parts: dict[int, Partial] = {}
        self._done: OrderedDict[int, Handshake] = OrderedDict()
        self._held = 0  # bytes copied and not yet written
        self._counter = 0
        self._counts = dict.fromkeys(("written", "marked_bad", "refused", "failed", "aged_out"), 0)
        self._jobs: queue.Queue[Finished | None] = queue.Queue(self._limits.queue_items)
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Make the folder ready and begin. Raises OSError and NotPrivate: a folder that cannot be used."""
        for name in remove_leftovers(self._folder.path):
            log.warning("removed %s, left behind by a process that is gone", name)
        self._folder.measure()
        self.announce()
        self._thread = threading.Thread(target=self._run, name="hsx-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a reply may have promised a dump that is still in the queue

    def announce(self, **more: Any) -> None:
        """Write the beacon, with what else there is to say. Raises nothing once the recorder runs."""
        facts, limits = self.facts, self._limits
        self._said.update(more)
        try:
            write_beacon(self._folder.path, {
                "version": facts.producer, "hooks": list(facts.hooks), "taps": list(facts.taps),
                "engine_layer_ids": list(facts.engine_layer_ids), "model": facts.model, "where":
                dict(facts.where), "limits": {"folder_bytes": limits.folder_bytes, "memory_bytes":
                limits.memory_bytes}, **facts.notes, **self._said,
            })  # fmt: skip
        except OSError as error:
            if self._thread is None:
                raise
            log.error("the beacon could not be written: %s", error)

    @property
    def stats(self) -> Stats:
        """A snapshot."""
        with self._lock:
            return Stats(**self._counts)

    def take(self, piece: Piece) -> Handshake | None:
        """After a forward: take the rows of one request. Never raises, never waits for the writer or the
        device.

        Returns: None while the prefill goes on; the handshake when it is complete.
        """
        if not piece.rid.startswith(PREFIX):
            return None
        try:
            with self._lock:
                return self._take(piece)
        except Exception as error:  # whatever it is, the request must not suffer
            log.exception("the capture of %s failed", piece.rid)
            return self.fail(piece.rid, piece.serial, f"the capture failed: {type(error).__name__}: {error}")

    def fail(self, rid: str, serial: int, reason: str) -> Handshake:
        """The server has no states for this request: leave an error file. Returns the handshake. Never
        raises."""
        if rid.startswith(PREFIX):
            with self._lock:
                partial = self._parts.pop(serial, None) or Partial(rid, serial, (), self._clock())
                self._refuse(partial, reason)
                self._finish(partial)
        return {"error": reason}

    def abandon(self, serial: int) -> None:
        """The request was aborted: drop what was taken of it."""
        with self._lock:
            partial = self._parts.pop(serial, None)
            if partial is not None:
                self._drop_rows(partial)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Write what is complete, then stop. Returns False when the time did not suffice."""
        atexit.unregister(self.close)
        with self._lock:
            first, self._closed = not self._closed, True
        thread = self._thread
        if thread is None:
            return True
        if first and thread.is_alive():
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                log.error("the writer does not keep up: %d dumps are lost", self._jobs.qsize())
        thread.join(timeout_s)
        try:
            remove_beacon(self._folder.path)
        except OSError as error:
            log.warning("the beacon could not be removed: %s", error)
        return not thread.is_alive() and self._jobs.empty()

    # On the forward thread, under the lock.

    def _take(self, piece: Piece) -> Handshake | None:
        complete = piece.end >= len(piece.prompt)
        before = self._done.get(piece.serial)
        if before is not None:
            return before if complete else None
        partial = self._parts.get(piece.serial)
        if partial is None or partial.is_restart(piece):
            if partial is not None:
                self._drop_rows(partial)
            partial = self._parts[piece.serial] = Partial(
                piece.rid, piece.serial, piece.prompt, self._clock()
            )
        partial.note(piece, self._clock())
        if partial.error:
            self._drop_rows(partial)
        else:
            self._copy(partial, piece)
        if not complete:
            return None
        del self._parts[piece.serial]
        return self._finish(partial)

    def _copy(self, partial: Partial, piece: Piece) -> None:
        slices = piece.slices()
        nbytes = sum(t.numel() * t.element_size() for t in slices.values())
        reason = self._no_room(piece.rid, nbytes)
        if reason:
            self._refuse(partial, reason)
            partial.busy = is_name(piece.rid)
            return
        rows = self._copier.copy(slices)
        partial.parts.append(rows)
        self._held += rows.nbytes

    def _no_room(self, rid: str, nbytes: int) -> str:
        if self._closed:
            return "the server is shutting down"
        if self._thread is None or not self._thread.is_alive():
            return "the writer thread is not running"
        if not is_name(rid):
            return f"the rid {rid[:200]!r} cannot name a file: 1 to 128 of A-Z a-z 0-9 . _ -"
        if self._held + nbytes > self._limits.memory_bytes:
            self._give_up(IDLE_S)  # an aborted prefill is not told: it only stops
        if self._held + nbytes > self._limits.memory_bytes:
            return f"backlog: {self._held} bytes wait to be written, at most {self._limits.memory_bytes} may"
        return self._folder.no_room(self._held + nbytes)

    def _give_up(self, idle_s: float) -> None:
        """Drop what was taken of prefills that made no progress for so long. Under the lock."""
        now = self._clock()
        for serial in [s for s, p in self._parts.items() if now - p.touched > idle_s]:
            partial = self._parts.pop(serial)
            self._drop_rows(partial)
            self._counts["aged_out"] += 1
            log.warning("aged out %s: its prefill stopped at %d tokens", partial.rid, partial.expected)

    def _refuse(self, partial: Partial, reason: str) -> None:
        partial.error, partial.refused = reason, True
        self._drop_rows(partial)

    def _drop_rows(self, partial: Partial) -> None:
        for rows in partial.parts:
            self._held -= rows.nbytes
            self._copier.release(rows)
        partial.parts = []

    def _finish(self, partial: Partial) -> Handshake:
        self._counter += 1
        dump_id = f"{os.getpid()}-{self._counter}"
        try:
            if not self._closed:
                self._jobs.put_nowait(Finished(partial, dump_id))
            elif not partial.refused:
                self._refuse(partial, "the server is shutting down")
        except queue.Full:
            self._refuse(partial, f"backlog: {self._jobs.qsize()} dumps wait to be written")
            partial.busy = True
        if partial.refused:
            self._counts["refused"] += 1
            handshake: Handshake = {"error": partial.error, **({"busy": True} if partial.busy else {})}
        else:
            path = dump_path(self._folder.path, partial.rid)
            handshake = {
                "path": str(path), "num_tokens": len(partial.prompt), "dump_id": dump_id,
                "taps": list(self.facts.taps), "engine_layer_ids": list(self.facts.engine_layer_ids),
            }  # fmt: skip
        self._done[partial.serial] = handshake
        if len(self._done) > REMEMBERED:
            self._done.popitem(last=False)
        return handshake

    # On the writer thread.

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._limits.tick_s)
            except queue.Empty:
                self._tick()
                continue
            if job is None:
                return
            self._write(job)
            self._tick()

    def _write(self, job: Finished) -> None:
        partial = job.partial
        try:
            if partial.refused:
                kind = ""
                self._mark(job, partial.error)
                self._folder.measure()  # what was full may have been emptied a moment ago
            else:
                dump = build_dump(job, self.facts, self._norm)
                self._folder.write(dump, self._clock())
                kind = "written" if dump.meta.ok else "marked_bad"
        except Exception as error:  # a full disk, a damaged folder: the next dump may fare better
            log.error("the dump of %s was not written: %s", partial.rid, error)
            kind = "failed"
            self._mark(job, f"the dump was not written: {type(error).__name__}: {error}")
        with self._lock:
            if kind:
                self._counts[kind] += 1
            self._drop_rows(partial)

    def _mark(self, job: Finished, reason: str) -> None:
        if not is_name(job.partial.rid):
            return
        try:
            write_error(self._folder.path, job.partial.rid, job.dump_id, reason)
        except OSError as error:
            log.error("%s: %s; and no error file could be written: %s", job.partial.rid, reason, error)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._told_at >= NEWS_S and (news := self._news()) != self._told:
            self._told, self._told_at = news, now
            self.announce(**news)
        with self._lock:
            self._give_up(self._limits.partial_ttl_s)
        try:
            self._folder.tick(now)
        except OSError as error:
            log.error("the dump folder cannot be looked after: %s", error)
