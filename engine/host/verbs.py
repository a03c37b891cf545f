"""The host's side of engine.wire.verbs: one request in, one answer out, every verb safe to repeat."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from engine.host import args as arg
from engine.host.facts import host_facts, serve_observe
from engine.host.fetch import serve_fetch, store_files
from engine.host.lifecycle import abort, start
from engine.host.put import put
from engine.host.rundir import RunDir, all_runs, run_status
from engine.host.servers.status import plan_verb, servers_verb
from engine.host.tail import serve_tail
from engine.wire.errors import HsxError, RemoteError, SpecError

Args = Mapping[str, Any]
Answer = dict[str, Any]


def status(args: Args, _: BinaryIO) -> Answer:
    """What is known of a run."""
    return {"status": run_status(RunDir.of(args.get("run")))}


def list_runs(_: Args, __: BinaryIO) -> Answer:
    """Every run on this host."""
    return {"runs": [run_status(rundir) for rundir in all_runs()]}


def probe(args: Args, _: BinaryIO) -> Answer:
    """HostFacts, once."""
    return {"facts": host_facts(args.get("url"), arg.texts(args, "paths"), arg.texts(args, "runs"))}


ANSWERS: dict[str, Callable[[Args, BinaryIO], Answer]] = {
    "start": start,
    "status": status,
    "list": list_runs,
    "abort": abort,
    "put": put,
    "probe": probe,
    "server_status": servers_verb,
    "server_plan": plan_verb,
    "store_files": store_files,
}
STREAMED: dict[str, Callable[[Args, int, BinaryIO], None]] = {
    "tail": serve_tail,
    "observe": serve_observe,
    "fetch": serve_fetch,
}


def _serve(verb: object, args: Args, stdin: BinaryIO, stdout: BinaryIO) -> Answer | None:
    if isinstance(verb, str) and verb in ANSWERS:
        return {"ok": True, **ANSWERS[verb](args, stdin)}
    if isinstance(verb, str) and verb in STREAMED:
        STREAMED[verb](args, stdin.fileno(), stdout)
        return None
    raise SpecError(f"unknown verb {verb!r}", f"known are {', '.join([*ANSWERS, *STREAMED])}")


def main(request: dict[str, Any], stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Serve one request; the caller has written ``<<nonce``. Returns the exit status.

    Errors that the user can act on travel as an answer; a defect of ours ends with a traceback on stderr.
    """
    os.umask(0o077)
    given = request.get("args")
    try:
        answer = _serve(request.get("verb"), given if isinstance(given, dict) else {}, stdin, stdout)
    except BrokenPipeError:
        return 0  # the console is gone
    except HsxError as error:
        answer = {"ok": False, "error": error.to_json()}
    except OSError as error:
        failed = RemoteError(f"{request.get('verb')} failed on the host", str(error))
        answer = {"ok": False, "error": failed.to_json()}
    if answer is not None:
        stdout.write(json.dumps(answer).encode() + b"\n")
        stdout.write(f">>{request['nonce']}\n".encode())
        stdout.flush()
    return 0
