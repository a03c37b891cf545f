"""``python -m engine VERB``: the commands on the host (cli.md). stdout is data and log, an error is one
line on stderr.

Under the supervisor HSX_RUN names the run directory: the specification is read from there and the result is
written there. Every verb ends with an ExitCode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.wire import stopwish
from engine.wire.errors import ExitCode, HsxError, SpecError
from engine.wire.verbs import EXIT_ABORTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _run_dir() -> Path | None:
    value = os.environ.get("HSX_RUN")
    return Path(value) if value else None


def _finish(result: dict[str, Any], as_json: bool) -> None:
    from engine.host.files import atomic_json

    run = _run_dir()
    if run is not None:
        atomic_json(run / "result.json", result)
    if as_json or run is None:
        sys.stdout.write(json.dumps(result) + "\n")


def _extract(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser("engine extract", description="take the hidden states of a dataset's rows")
    p.add_argument(
        "--spec", type=Path, help="the run specification (default: spec.json of the run directory)"
    )
    p.add_argument("--run-dir", type=Path, help="where events go when no supervisor runs this")
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    run = _run_dir() or a.run_dir
    spec_file = a.spec or (run / "spec.json" if run else None)
    if run is None or spec_file is None:
        raise SpecError("no run directory", "HSX_RUN is not set", "give --spec FILE and --run-dir DIR")
    try:
        data = json.loads(spec_file.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {spec_file}", str(error), "give a run specification") from error
    attempt = int(data.get("attempt", 1)) if isinstance(data, dict) else 1
    from engine.wire.spec import extract_from_json

    spec = extract_from_json(data.get("spec", data) if isinstance(data, dict) else data)
    from engine.host.events import EventLog
    from engine.run.job import run_job
    from engine.run.output import hold_output

    if stopwish.asked():  # it came while all this was imported
        _finish({"schema_version": 1, "outcome": "aborted"}, a.json)
        return EXIT_ABORTED
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    with hold_output(Path(spec.store), supervised=_run_dir() is not None):
        with contextlib.closing(EventLog(run / "events.jsonl")) as events:
            try:
                result = asyncio.run(run_job(spec, events, attempt))
            finally:
                stopwish.install()  # the loop took its handlers with it, and the result is not written yet
    _finish(result.to_json(), a.json)
    if result.outcome == "aborted":
        return EXIT_ABORTED
    return ExitCode.OK if result.done == result.dataset else ExitCode.FINDING


def _verify(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser("engine verify", description="read a whole store again")
    p.add_argument("store", type=Path)
    p.add_argument(
        "--recompute",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="also compare N samples (default: all) with a lone forward of the target",
    )
    p.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="also tokenise the dataset's rows again with the model of the store, and compare the token ids "
        "of every done row; an error when FILE is not the dataset that the store was made from",
    )
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    from engine.run.check import verify

    report, verified = verify(a.store, a.recompute, a.dataset)
    result = report.to_json() | ({"verified": verified} if verified is not None else {})
    _finish(result, a.json)
    return ExitCode.FINDING if report.bad or report.quarantined or report.pending else ExitCode.OK


def _complete(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser("engine complete", description="let a server answer prompts, by token ids")
    p.add_argument("prompts", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--model", required=True)
    p.add_argument("--url", required=True)
    p.add_argument("--max-new-tokens", type=int, default=512)
    p.add_argument("--thinking", action="store_true")
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    from engine.run.complete import complete

    rows = asyncio.run(
        complete(a.prompts, a.model, a.url, a.out, max_new_tokens=a.max_new_tokens, thinking=a.thinking)
    )
    _finish({"schema_version": 1, "rows": rows, "out": str(a.out)}, a.json)
    return ExitCode.OK


def _probe(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser("engine probe", description="what this host is and has")
    p.add_argument("--url", help="a server to ask")
    p.add_argument("--path", action="append", default=[])
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    from engine.host.facts import host_facts

    _finish(host_facts(a.url, a.path, []), True)
    return ExitCode.OK


def _plugin(argv: Sequence[str]) -> int:
    """How to start a SGLang server so that it captures: variables and flags, as JSON."""
    p = argparse.ArgumentParser("engine plugin", description="how a SGLang server is started to capture")
    p.add_argument("--dump-dir", required=True, help="a folder of its own, best in /dev/shm; made 0700")
    p.add_argument("--taps", required=True, help='outputs of 0-based layers, for example "1 29 57"')
    p.add_argument("--folder-bytes", type=int, help="what the folder may hold (8 GiB)")
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    from engine.capture import plugin

    try:
        taps = [int(tap) for tap in a.taps.replace(",", " ").split()]
    except ValueError as error:
        raise SpecError(
            f"bad --taps {a.taps!r}", "they are layer numbers", 'for example "1 29 57"'
        ) from error
    environment = plugin.server_environment(os.environ, a.dump_dir, a.folder_bytes)
    flags = plugin.server_flags(taps)
    _finish({"schema_version": 1, "environment": environment, "flags": flags}, True)
    return ExitCode.OK


def _demo(argv: Sequence[str]) -> int:
    from engine.demo import serve, sglang, traffic

    verbs: dict[str, Callable[[list[str]], int]] = {
        "serve": serve.main,
        "sglang": sglang.main,
        "traffic": traffic.main,
        "convert": _demo_convert,
        "dataset": _demo_dataset,
    }
    if not argv or argv[0] not in verbs:
        raise SpecError("engine demo needs a verb", f"got {argv[:1]}", f"one of {', '.join(verbs)}")
    return verbs[argv[0]](list(argv[1:]))


def _demo_convert(argv: list[str]) -> int:
    """Make the demo's model folder (the server does it by itself when it is not there)."""
    p = argparse.ArgumentParser("engine demo convert")
    p.add_argument("cache", type=Path)
    from engine.demo.convert import ensure_smollm2

    sys.stdout.write(f"{ensure_smollm2(p.parse_args(argv).cache)}\n")
    return ExitCode.OK


def _demo_dataset(argv: list[str]) -> int:
    """Complete the ten prompts by the server, then put the demo's dataset together (kept when it is
    there)."""
    p = argparse.ArgumentParser("engine demo dataset")
    p.add_argument("out", type=Path)
    p.add_argument("--model", required=True)
    p.add_argument("--url", required=True)
    p.add_argument("--max-new-tokens", type=int, default=96)
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    from engine.demo.dataset import PROMPTS, assemble
    from engine.run.complete import complete

    if not a.out.exists():
        answered = a.out.with_suffix(".answered.jsonl")
        asyncio.run(complete(PROMPTS, a.model, a.url, answered, max_new_tokens=a.max_new_tokens))
        assemble(answered, a.out)
    rows = len(a.out.read_bytes().splitlines())
    _finish({"schema_version": 1, "rows": rows, "out": str(a.out)}, a.json)
    return ExitCode.OK


def _server_job(_: Sequence[str]) -> int:
    """A job on a server, as spec.json of the run directory orders it."""
    from engine.host.events import EventLog
    from engine.host.files import read_json
    from engine.host.servers.job import run_job
    from engine.host.servers.wanted import order_from

    run = _run_dir()
    record = read_json(run / "spec.json") if run is not None else None
    if run is None or record is None or not isinstance(record.get("spec"), dict):
        raise SpecError("no order", "HSX_RUN names no run of a server's job", "use hsx-console server")
    with contextlib.closing(EventLog(run / "events.jsonl")) as events:
        result = run_job(order_from(record["spec"]), f"{run.name}.{record.get('attempt')}", events)
    _finish({"schema_version": 1, **result}, False)
    return ExitCode.OK


def _server_exec(argv: Sequence[str]) -> int:
    """Become the server of a saved description."""
    from engine.host.servers.program import execute

    if len(argv) != 1:
        raise SpecError("engine server-exec needs one path", "", "use hsx-console server")
    return execute(Path(argv[0]))


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "extract": _extract,
    "complete": _complete,
    "verify": _verify,
    "probe": _probe,
    "plugin": _plugin,
    "server-job": _server_job,
    "server-exec": _server_exec,
    "demo": _demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stderr.write(f"usage: python -m engine {{{','.join(VERBS)}}} ...\n")
        return ExitCode.OK if args else ExitCode.USAGE
    if args[0] not in VERBS:
        sys.stderr.write(f"engine: unknown verb {args[0]!r}: one of {', '.join(VERBS)}\n")
        return ExitCode.USAGE
    if args[0] == "extract":
        stopwish.install()  # before the heavy imports: a stop in their midst is heeded, not a death
    try:
        return VERBS[args[0]](args[1:])
    except HsxError as error:
        _write_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.FINDING
    except Exception as error:
        # A defect of ours. The traceback goes to a file beside the run, or to the log, and never replaces
        # the sentence.
        traceback.print_exc()
        _write_error(
            HsxError("the engine failed", f"{type(error).__name__}: {error}", "report this with the log")
        )
        return ExitCode.FINDING


def _write_error(error: HsxError) -> None:
    sys.stderr.write(f"engine: {error}\n")
    run = _run_dir()
    if run is None:
        return
    from engine.host.files import atomic_json

    try:
        atomic_json(run / "result.json", {"schema_version": 1, "outcome": "failed", "error": error.to_json()})
    except OSError as failed:
        sys.stderr.write(f"engine: cannot write result.json: {failed}\n")


if __name__ == "__main__":
    sys.exit(main())
