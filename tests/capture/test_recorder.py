"""The recorder: joins chunks by position, refuses what finds no room, and never troubles a request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.capture.pythonpath.hsx_capture.beacon import read_beacons
from engine.capture.pythonpath.hsx_capture.dumpfile import (
    Dump,
    DumpMissing,
    WriterFailed,
    read_dump,
    write_dump,
)
from engine.capture.pythonpath.hsx_capture.folder import Limits
from engine.capture.pythonpath.hsx_capture.joining import Piece
from engine.capture.pythonpath.hsx_capture.recorder import CaptureFacts, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FACTS = CaptureFacts((1, 3), (2, 4), "model", "test 1", {"tp_rank": 0}, ("hook",))
H = 4
ROOM = Limits(free_floor_bytes=0, tick_s=0.02)


def rid(row: int, attempt: int = 1) -> str:
    return f"hsx-run-{row:08d}-{attempt:02d}_"


def norm(pre: torch.Tensor) -> torch.Tensor:
    return pre / pre.float().pow(2).mean(-1, keepdim=True).sqrt().to(pre.dtype)


@dataclass
class Prompt:
    """A request and its true states."""

    rid: str
    serial: int
    length: int
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        made = torch.Generator().manual_seed(self.serial)
        self.ids = list(range(self.serial * 100, self.serial * 100 + self.length))
        self.aux = torch.randn(self.length, 2 * H, generator=made)
        self.pre = torch.randn(self.length, H, generator=made)
        self.last = norm(self.pre)

    def piece(self, start: int, end: int, **change: Any) -> Piece:
        """The rows start to end, as slices of a batch that is overwritten later."""
        given = {
            "aux": self.aux[start:end].clone(), "last": self.last[start:end].clone(),
            "pre": self.pre[start:end].clone(), "seen": torch.tensor(self.ids[start:end]),
            "batch": {"forward": 1}, **change,
        }  # fmt: skip
        return Piece(self.rid, self.serial, self.ids, start, **given)

    def is_in(self, dump: Dump) -> bool:
        assert dump.aux is not None and dump.last is not None and dump.pre is not None
        return (
            dump.input_ids.tolist() == self.ids
            and torch.equal(dump.aux, self.aux)
            and torch.equal(dump.last, self.last)
            and torch.equal(dump.pre, self.pre)
        )


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def make(limits: Limits = ROOM, **more: Any) -> Recorder:
        r = Recorder(tmp_path / "d", FACTS, limits, **more)
        r.start()
        made.append(r)
        return r

    yield make
    for r in made:
        r.close()


def wait_for(folder: Path, name: str) -> Dump:
    deadline = time.monotonic() + 10
    while True:
        try:
            return read_dump(folder, name)
        except DumpMissing:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_chunks_of_several_requests_are_joined_by_position(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    r = recorder(norm=norm)
    a, b = Prompt(rid(1), 1, 10), Prompt(rid(2), 2, 7)
    piece = a.piece(0, 4)
    assert r.take(piece) is None
    piece.aux.fill_(9)  # the server reuses its buffers
    piece.seen.fill_(9) if piece.seen is not None else None
    handshake = r.take(b.piece(0, 7))
    assert r.take(a.piece(4, 9)) is None
    second = r.take(a.piece(9, 10))
    assert handshake is not None and second is not None
    for prompt, said in ((a, second), (b, handshake)):
        dump = wait_for(tmp_path / "d", prompt.rid)
        assert dump.meta.ok and prompt.is_in(dump) and dump.meta.ids_checked
        assert said == {
            "path": str(tmp_path / "d" / f"{prompt.rid}.safetensors"), "num_tokens": prompt.length,
            "dump_id": dump.meta.dump_id,
            "taps": [1, 3],
            "engine_layer_ids": [2, 4],
        }  # fmt: skip
    chunks = wait_for(tmp_path / "d", a.rid).meta.chunks
    assert [(c.start, c.rows) for c in chunks] == [(0, 4), (4, 5), (9, 1)] and chunks[0].batch == {
        "forward": 1
    }
    assert eventually(lambda: r.stats.written == 2)


def test_others_requests_are_not_looked_at(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    r = recorder()
    for name in ("HEALTH_CHECK_1", "hsxc-complete", "0b1c", ""):
        assert r.take(Prompt(name, 5, 3).piece(0, 3)) is None
    assert r.close()
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (
            [(3, 10)],
            "prefix cache hit: the first 3 of 10 rows were not computed for this request: 3 rows are",
        ),
        ([(0, 4), (6, 10)], "lost chunk: a chunk starts at 6 but only 4 of 10 rows had arrived: 2 rows are"),
        ([(0, 4), (2, 10)], "a chunk starts at 2 a second time"),
    ],
)
def test_missing_rows_make_a_dump_that_is_not_ok(
    recorder: Callable[..., Recorder], tmp_path: Path, pieces: list[tuple[int, int]], text: str
) -> None:
    r = recorder()
    a = Prompt(rid(1), 1, 10)
    said = [r.take(a.piece(*p)) for p in pieces]
    assert said[-1] is not None and "path" in said[-1]
    dump = wait_for(tmp_path / "d", a.rid)
    assert not dump.meta.ok and text in dump.meta.error and dump.aux is None
    assert dump.input_ids.tolist() == a.ids and len(dump.meta.chunks) == len(pieces)
    assert eventually(lambda: r.stats.marked_bad == 1)


def test_other_ids_in_the_forward_are_found(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    r = recorder()
    a = Prompt(rid(1), 1, 10)
    wrong = a.ids[4:10]
    wrong[2] = 7
    r.take(a.piece(0, 4))
    r.take(a.piece(4, 10, seen=torch.tensor(wrong)))
    dump = wait_for(tmp_path / "d", a.rid)
    assert not dump.meta.ok
    assert dump.meta.error == (
        "the forward saw other token ids: 7 instead of 106 at position 6, 1 of 10 differ"
    )


def test_without_the_forwards_ids_the_dump_says_that_nobody_looked(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    r = recorder()
    a = Prompt(rid(1), 1, 4)
    r.take(a.piece(0, 4, seen=None))
    meta = wait_for(tmp_path / "d", a.rid).meta
    assert meta.ok and not meta.ids_checked


@pytest.mark.parametrize("value", [1.5, float("nan")])
def test_a_last_state_that_is_not_the_norm_of_pre_is_found(
    recorder: Callable[..., Recorder], tmp_path: Path, value: float
) -> None:
    r = recorder(norm=norm)
    a = Prompt(rid(1), 1, 6)
    last = a.last.clone()
    last[3] *= value
    r.take(a.piece(0, 6, last=last))
    dump = wait_for(tmp_path / "d", a.rid)
    assert not dump.meta.ok and "the final norm of pre is not last" in dump.meta.error


def test_a_request_that_is_taken_back_is_dumped_once(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    r = recorder()
    a = Prompt(rid(1), 1, 10)
    r.take(a.piece(0, 6))
    r.take(a.piece(0, 5))  # retracted in the middle: from the beginning again
    first = r.take(a.piece(5, 10))
    dump = wait_for(tmp_path / "d", a.rid)
    assert dump.meta.ok and a.is_in(dump)
    assert r.take(a.piece(0, 4)) is None and r.take(a.piece(4, 10)) == first, "retracted after its prefill"
    assert r.close() and r.stats.written == 1


def test_the_same_rid_again_is_another_dump(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    write_dump(tmp_path / "d", Dump(wait_meta(), torch.tensor([1])))
    r = recorder()
    first = r.take(Prompt(rid(1), 1, 5).piece(0, 5))
    second = r.take(Prompt(rid(1), 2, 6).piece(0, 6))
    assert first is not None and second is not None and first["dump_id"] != second["dump_id"]
    assert r.close()
    dump = read_dump(tmp_path / "d", rid(1))
    assert dump.meta.dump_id == second["dump_id"] and Prompt(rid(1), 2, 6).is_in(dump)


def wait_meta() -> Any:
    """The metadata of a leftover of an earlier process."""
    from engine.capture.pythonpath.hsx_capture.dumpfile import DumpMeta

    return DumpMeta(rid(1), 1, "", (1,), (1,), "m", (), {"dump_id": "1-1"})


def test_an_abandoned_request_leaves_nothing(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    r = recorder()
    a = Prompt(rid(1), 1, 10)
    r.take(a.piece(0, 6))
    r.abandon(1)
    r.abandon(99)
    assert r.close()
    assert list((tmp_path / "d").iterdir()) == []


def test_a_stopped_prefill_ages_out_although_nothing_happens(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    r = recorder(Limits(free_floor_bytes=0, tick_s=0.02, partial_ttl_s=0.5))
    a, slow = Prompt(rid(1), 1, 10), Prompt(rid(2), 2, 400)
    r.take(a.piece(0, 6))
    for start in range(0, 400, 4):  # slower in all than the limit, never without progress
        r.take(slow.piece(start, start + 4))
        time.sleep(0.01)
    assert eventually(lambda: r.stats.aged_out == 1)
    assert wait_for(tmp_path / "d", slow.rid).meta.ok


def test_aborted_prefills_give_way_when_memory_is_full(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    """A server does not tell an abort: the rows would be held for a quarter of an hour."""
    now = [0.0]
    one = sum(t.numel() * t.element_size() for t in Prompt(rid(1), 1, 10).piece(0, 6).slices().values())
    limits = Limits(free_floor_bytes=0, memory_bytes=4 * one, partial_ttl_s=900.0)
    r = recorder(limits, clock=lambda: now[0])
    for number in range(1, 5):
        r.take(Prompt(rid(number), number, 10).piece(0, 6))  # and it never goes on
    late = Prompt(rid(5), 5, 6)
    refused = r.take(late.piece(0, 6))
    assert refused is not None and refused["busy"]
    now[0] = 61.0
    good = Prompt(rid(6), 6, 6)
    said = r.take(good.piece(0, 6))
    assert said is not None and "path" in said
    assert wait_for(tmp_path / "d", good.rid).meta.ok
    assert r.stats.aged_out == 4


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(free_floor_bytes=0, memory_bytes=100), "backlog: 0 bytes wait"),
        (Limits(free_floor_bytes=0, folder_bytes=400), "no room: the dump folder holds"),
        (Limits(free_floor_bytes=1 << 60), "no room: "),
    ],
)
def test_what_finds_no_room_is_refused_with_an_error_file(
    recorder: Callable[..., Recorder], tmp_path: Path, limits: Limits, text: str
) -> None:
    r = recorder(limits)
    a = Prompt(rid(1), 1, 10)
    said = [r.take(a.piece(0, 6)), r.take(a.piece(6, 10))]
    assert said[0] is None and said[1] is not None and text in said[1]["error"]
    assert r.close()
    with pytest.raises(WriterFailed, match=text):
        read_dump(tmp_path / "d", a.rid)
    assert r.stats.refused == 1 and r.stats.written == 0


def test_room_comes_back_when_dumps_are_fetched(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    r = recorder(Limits(free_floor_bytes=0, tick_s=0.02, folder_bytes=4000))
    refused = None
    for i in range(1, 20):
        said = r.take(Prompt(rid(i), i, 10).piece(0, 10))
        if said is not None and "error" in said:
            refused = said
            break
        wait_for(tmp_path / "d", rid(i))
    assert refused is not None and "fetched" in refused["error"]
    for path in (tmp_path / "d").glob("hsx-*"):
        path.unlink()

    def fits() -> bool:
        i = int(time.monotonic() * 1e6)
        said = r.take(Prompt(rid(50), i, 3).piece(0, 3))
        return said is not None and "path" in said

    assert eventually(fits)


def test_a_full_queue_refuses_and_does_not_wait(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    release = threading.Event()

    def slow_norm(pre: torch.Tensor) -> torch.Tensor:
        release.wait(20)
        return norm(pre)

    r = recorder(Limits(free_floor_bytes=0, queue_items=2), norm=slow_norm)
    began = time.monotonic()
    said = [r.take(Prompt(rid(i), i, 5).piece(0, 5)) for i in range(1, 8)]
    assert time.monotonic() - began < 5
    errors = [s["error"] for s in said if s is not None and "error" in s]
    assert len(errors) >= 4 and all("backlog" in e for e in errors)
    release.set()
    assert r.close()
    assert r.stats.written == 7 - len(errors)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses to make files longer than 3000 bytes, in a process of its own."""
    code = f"""
import json, resource, signal, sys
from pathlib import Path
from tests.capture.test_recorder import FACTS, ROOM, Prompt, rid
from engine.capture.pythonpath.hsx_capture.recorder import Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
r = Recorder(Path({str(tmp_path / "d")!r}), FACTS, ROOM)
r.start()
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
said = [r.take(Prompt(rid(i), i, n).piece(0, n)) for i, n in ((1, 200), (2, 5))]
r.close()
print(json.dumps([said, vars(r.stats)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said, stats = json.loads(done.stdout)
    assert "path" in said[0] and "path" in said[1]
    assert (stats["failed"], stats["written"]) == (1, 1)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        f"{rid(1)}.error.json",
        f"{rid(2)}.safetensors",
    ]
    with pytest.raises(WriterFailed, match="File too large"):
        read_dump(tmp_path / "d", rid(1))


def test_a_folder_that_is_lost_or_planted_fails_no_request(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    r = recorder()
    folder = tmp_path / "d"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    assert r.take(Prompt(rid(1), 1, 5).piece(0, 5)) is not None
    assert eventually(lambda: r.stats.failed == 1)
    assert list(elsewhere.iterdir()) == [], "nothing is written through the link"
    folder.unlink()
    assert r.take(Prompt(rid(2), 2, 5).piece(0, 5)) is not None
    assert wait_for(folder, rid(2)).meta.ok, "the folder is made again"


def test_an_error_of_its_own_becomes_a_handshake(recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    r = recorder()
    a = Prompt(rid(1), 1, 5)

    class Broken(list[int]):
        def __len__(self) -> int:
            raise MemoryError("no more")

    said = r.take(Piece(a.rid, 1, Broken(), 0, a.aux, a.last, a.pre))
    assert said == {"error": "the capture failed: MemoryError: no more"}
    assert r.fail(rid(2), 2, "the batch failed") == {"error": "the batch failed"}
    assert r.close()
    for name, text in ((rid(1), "no more"), (rid(2), "the batch failed")):
        with pytest.raises(WriterFailed, match=text):
            read_dump(tmp_path / "d", name)


@pytest.mark.parametrize("name", ["hsx-../../x", "hsx-" + "a" * 200, "hsx-a b", "hsx-ü"])
def test_a_rid_that_cannot_name_a_file_is_refused(
    recorder: Callable[..., Recorder], tmp_path: Path, name: str
) -> None:
    r = recorder()
    said = r.take(Prompt(name, 1, 5).piece(0, 5))
    assert said is not None and "cannot name a file" in said["error"]
    assert r.close() and list((tmp_path / "d").iterdir()) == []


def test_dumps_that_nobody_fetches_are_removed_but_not_what_took_their_place(
    recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    r = recorder(Limits(free_floor_bytes=0, tick_s=0.02, dump_ttl_s=0.3))
    for i in (1, 2):
        r.take(Prompt(rid(i), i, 5).piece(0, 5))
        wait_for(tmp_path / "d", rid(i))
    foreign = wait_for(tmp_path / "d", rid(2))
    write_dump(tmp_path / "d", foreign)  # another file of the same name
    assert eventually(lambda: not (tmp_path / "d" / f"{rid(1)}.safetensors").exists())
    time.sleep(0.7)
    assert (tmp_path / "d" / f"{rid(2)}.safetensors").exists()


def test_close_writes_what_was_promised_and_refuses_what_comes_later(tmp_path: Path) -> None:
    r = Recorder(tmp_path / "d", FACTS, ROOM)
    r.start()
    assert len(read_beacons(tmp_path / "d")) == 1
    prompts = [Prompt(rid(i), i, 50) for i in range(1, 60)]
    for p in prompts:
        r.take(p.piece(0, 50))
    assert r.close()
    assert read_beacons(tmp_path / "d") == []
    for p in prompts:
        assert p.is_in(read_dump(tmp_path / "d", p.rid))
    said = r.take(Prompt(rid(99), 99, 5).piece(0, 5))
    assert said == {"error": "the server is shutting down", "busy": True}
    assert r.close(), "a second time does nothing"


def test_a_process_that_ends_without_close_still_writes(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.capture.test_recorder import FACTS, ROOM, Prompt, rid
from engine.capture.pythonpath.hsx_capture.recorder import Recorder
r = Recorder(Path({str(tmp_path / "d")!r}), FACTS, ROOM)
r.start()
for i in range(1, 30):
    r.take(Prompt(rid(i), i, 100).piece(0, 100))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "d").glob("hsx-*.safetensors"))) == 29


def test_the_buffer_pool_gives_a_buffer_to_one_owner_at_a_time() -> None:
    from engine.capture.pythonpath.hsx_capture.hostcopy import BufferPool

    pool = BufferPool(pinned=False)
    a, b = pool.acquire(5000), pool.acquire(5000)
    assert a.numel() == 8192 and a.data_ptr() != b.data_ptr()
    pool.release(a)
    assert pool.acquire(6000).data_ptr() == a.data_ptr()
    assert pool.acquire(1).numel() == 4096


def test_the_recorder_needs_neither_the_engine_nor_torch_to_be_imported() -> None:
    code = """
import sys
import engine.capture.pythonpath.hsx_capture.recorder
loaded = {m.split(".")[1] for m in sys.modules if m.startswith("engine.")}
print(sorted(loaded), "torch" in sys.modules, "safetensors" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['capture'] False False\n", done.stderr
