"""The supervisor: one detached process per run that launches the engine, beats, stops it in stages, records
its end.

It never stands between the engine and its log (no pipe), so its death harms nothing: the engine goes on as an
orphan, and a later abort adopts it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.host import args as arg
from engine.host.detach import run_detached
from engine.host.engines import AdoptedEngine, Engine, OwnEngine
from engine.host.files import atomic_json, read_json
from engine.wire.errors import Refused
from engine.wire.events import now_iso
from engine.wire.procid import ProcessId

if TYPE_CHECKING:
    from engine.host.rundir import RunDir

HEARTBEAT_S = 2.0
POLL_S = 0.1
RECORD_DEADLINE_S = 300.0
FULL_BYTES = 16 << 10

Launch = Callable[[], Engine]


class _Stop:
    """The stages of an end: 0 none, 1 TERM to the engine only, 2 INT and 3 KILL to its group."""

    def __init__(self, path: RunDir, default: tuple[float, float]) -> None:
        self._file = path.path / "stop.json"
        self._default = default
        self._since = 0.0
        self.stage = 0
        self.asked = False

    def _grace(self) -> tuple[float, float]:
        """Read anew at each stage: a second abort may be less patient."""
        stop = read_json(self._file)
        given = stop.get("grace") if stop else None
        return (
            (float(given[0]), float(given[1]))
            if isinstance(given, list) and len(given) == 2
            else self._default
        )

    def advance(self, engine: Engine) -> None:
        """Send the next signal if its time has come."""
        now = time.monotonic()
        if self.stage == 0:
            if not self.asked and not self._file.exists():
                return
            engine.id.send(signal.SIGTERM)  # to the engine only: it finishes its batch and flushes its shard
        elif self.stage == 1 and now > self._since + self._grace()[0]:
            engine.id.send_group(signal.SIGINT)
        elif self.stage == 2 and now > self._since + self._grace()[1]:
            engine.id.send_group(signal.SIGKILL)
        else:
            return
        self.stage += 1
        self._since = now


def _say(text: str) -> None:
    """A line in sup.log."""
    sys.stderr.write(f"{now_iso()} {text}\n")
    sys.stderr.flush()


def _beat(rundir: RunDir) -> None:
    try:
        (rundir.path / "heartbeat").touch(0o600)
    except OSError as error:
        _say(f"no heartbeat: {error}")


def _last_words(rundir: RunDir) -> str:
    """The last line of stdio.log, at most 500 characters: why the engine ended, most likely."""
    try:
        with (rundir.path / "stdio.log").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode("utf-8", "backslashreplace").strip().splitlines()
    except OSError as error:
        return f"stdio.log cannot be read: {error.strerror}"
    if lines:
        return lines[-1][-500:]
    full = shutil.disk_usage(rundir.path).free < FULL_BYTES
    return "the disk of the run directory is full, so the log is empty" if full else ""


def _record_end(rundir: RunDir, record: dict[str, Any]) -> None:
    """Write exit.json; on a full disk spend the reserve, then wait for room."""
    end = time.monotonic() + RECORD_DEADLINE_S
    while True:
        try:
            atomic_json(rundir.path / "exit.json", record)
            (rundir.path / ".reserve").unlink(missing_ok=True)
            return
        except OSError as error:
            if (rundir.path / ".reserve").exists():
                (rundir.path / ".reserve").unlink()
                continue
            _say(f"no exit record: {error}: {record}")
            if time.monotonic() > end:
                raise
            _beat(rundir)
            time.sleep(1)


def _unlaunched(why: str) -> dict[str, Any]:
    """The exit record of an engine that never ran, as a shell would number it."""
    return {"rc": 127, "signal": None, "stage": 0, "reaped": 0, "error": why, "at": now_iso()}


def _watch(rundir: RunDir, engine: Engine, stop: _Stop) -> None:
    """Beat and stop until the engine has ended, then record how."""
    next_beat = 0.0
    while not engine.ended():
        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + HEARTBEAT_S
            _beat(rundir)
        stop.advance(engine)
        time.sleep(POLL_S)
    ended = engine.bury()
    failed = ended.signal is not None or ended.rc not in (0, None)
    error = ended.note or (_last_words(rundir) if failed else "")
    _record_end(
        rundir,
        {
            "rc": ended.rc,
            "signal": ended.signal,
            "stage": stop.stage,
            "reaped": ended.reaped,
            "error": error or None,
            "at": now_iso(),
        },
    )


def _launch(rundir: RunDir, spec: dict[str, Any], output_lock: int | None) -> Engine:
    """Start the engine in a session of its own; it inherits the output lock, so the lock outlives the
    supervisor."""
    log = os.open(
        rundir.path / "stdio.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        size = os.fstat(log).st_size
        if size and os.pread(log, 1, size - 1) != b"\n":
            os.write(log, b"\n")  # the attempt before was cut off in the middle of a line
        process = subprocess.Popen(
            spec["argv"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=spec["cwd"],
            env={**inherited_env(arg.key_env(spec)), **FIXED_ENV, **spec["env"], "HSX_RUN": str(rundir.path)},
            start_new_session=True,
            pass_fds=() if output_lock is None else (output_lock,),
        )
    finally:
        os.close(log)
    return OwnEngine(process)


INHERITED = frozenset(
    {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}
    | {"HF_HOME", "HF_HUB_CACHE"}  # where the login keeps its models
)
FIXED_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""For what an engine may start in its turn; its own interpreter is told by -u and -B."""
INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "XDG_")


def inherited_env(key_env: str | None = None) -> dict[str, str]:
    """What of the login's environment a run gets: a short list, so that no secret of the shell slips in.

    ``key_env``: the variable with the server's key, which the run specification names.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or name.startswith(INHERITED_PREFIXES) or name == key_env
    }


def _supervise(rundir: RunDir, spec: dict[str, Any], launch: Launch, report: int, start_lock: int) -> None:
    """The supervisor's life. ``report``: the pipe on which the starter waits; ``start_lock`` is held until
    the records are written, so that a repeated start, made while this one is still under way, sees them."""
    stop = _Stop(rundir, tuple(spec["grace"]))
    signal.signal(signal.SIGTERM, lambda *_: setattr(stop, "asked", True))
    me = ProcessId.of(os.getpid())
    assert me is not None
    atomic_json(rundir.path / "sup.json", {**me.to_json(), "at": now_iso()})
    try:
        engine = launch()
    except OSError as error:
        why = f"{error.filename or spec['argv'][0]}: {error.strerror}"
        refused = Refused(
            f"run {rundir.run} cannot be launched", why, "correct the interpreter or the folder"
        )
        _record_end(rundir, _unlaunched(why))
        os.write(report, json.dumps(refused.to_json()).encode())
        return
    try:
        atomic_json(rundir.path / "child.json", engine.id.to_json())
    except OSError as error:
        engine.id.send_group(signal.SIGKILL)
        _record_end(rundir, _unlaunched(f"child.json: {error.strerror}"))
        raise
    _beat(rundir)
    os.close(report)
    os.close(start_lock)
    _watch(rundir, engine, stop)


def _detached(
    rundir: RunDir, spec: dict[str, Any], launch: Launch, start_lock: int, output_lock: int | None
) -> None:
    keep = {start_lock} if output_lock is None else {start_lock, output_lock}
    run_detached(
        lambda report: _supervise(rundir, spec, launch, report, start_lock),
        f"run {rundir.run}",
        rundir.path / "sup.log",
        keep,
    )


def start_supervisor(rundir: RunDir, spec: dict[str, Any], start_lock: int, output_lock: int | None) -> None:
    """Launch the attempt that ``spec`` describes, detached. Raises Refused when it cannot be launched."""
    _detached(rundir, spec, lambda: _launch(rundir, spec, output_lock), start_lock, output_lock)


def adopt(rundir: RunDir, spec: dict[str, Any], child: ProcessId, start_lock: int) -> None:
    """Give an orphaned engine a new supervisor."""
    _detached(rundir, spec, lambda: AdoptedEngine(child, str(rundir.path)), start_lock, None)
