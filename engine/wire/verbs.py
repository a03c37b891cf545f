"""The verbs by which the console asks something of a host, and the shapes of their answers.

A call is one exec of one constant command. On its stdin: a line with the constant bootstrap code as a JSON
string, a line with the request ``{"nonce", "engine", "verb", "args"}``, then payload bytes where a verb
takes them. On its stdout, after a line ``<<nonce``: for most verbs one line ``{"ok": true, ...}`` or
``{"ok": false, "error": {...}}`` (errors.to_json) and a line ``>>nonce``; for ``tail`` and ``observe`` a
stream that ends when stdin is closed. Every verb is idempotent: after a lost link the same call may simply
be made again.

=========  ==========================================  =====================================================
verb       args                                        answer
=========  ==========================================  =====================================================
start      run, attempt, kind, argv, env, cwd,         ``{"status": RunStatus, "already": bool}``
           output (a folder to lock, or null), spec,
           grace [term_s, int_s]
status     run                                         ``{"status": RunStatus}``
list       --                                          ``{"runs": [RunStatus]}``
abort      run, grace                                  ``{"status": RunStatus, "noop": bool}``
tail       run, file, offset, inode, max_bytes         frames, see below
observe    interval_s, url, paths, runs                a JSON line each interval: HostFacts
put        path, sha256, size (+ payload)              ``{"path", "state": "written" | "present"}``
probe      url, paths                                  ``{"facts": HostFacts}``
server_    servers [{name, url, launch, unit,          ``{"servers": [ServerState], "others":
status     dump_dir, log}]                             [ServerProcess]}``; changes nothing
server_    server (as above), action, taps, restore,   ``{"plan": {"run", "attempt", "order", "process",
plan       expected (pid, start, boot)                 "noop", "difference", "steps", "refused", ...}}``
store      store, after (a name); the verb's name is   ``{"files": [{"name", "size", "inode"}], "more"}``
           store_files
fetch      store, name, offset, size                   a file's bytes, see below
=========  ==========================================  =====================================================

``start`` with attempt 1 begins a run; with attempt n+1 it resumes one whose attempt n has ended. An attempt
that already exists is never launched again (``already: true``).

RunStatus: ``{"run", "kind", "attempt", "state", "pid", "started_at", "heartbeat_age_s", "exit": {"rc",
"signal", "stage", "reaped", "error", "at"} | null, "result": object | null, "stop": object | null,
"output", "files": {name: {"size", "inode"}}, "now"}``. ``result`` is what the engine wrote to result.json.

Tail frames: ``<offset> <length> <inode>\\n<bytes>`` with complete lines only; length 0 is a sign of life;
``<offset> RESET <inode>\\n`` when the file shrank or was replaced; ``<offset> EOF <inode>\\n`` once the run
has ended and the file is drained. A line over 1 MiB comes in pieces without a newline, and so does the
unfinished last line of an ended stdio.log. ``max_bytes`` > 0: whenever more than that lies unread, the host
goes on at the first line of the last ``max_bytes``, so the next offset is beyond the one expected. An error
in place of a stream is the line ``{"ok": false, "error"}``.

``fetch``: a JSON line ``{"ok": true, "bytes": n}``, n bytes (``offset`` to ``size`` of the file), a JSON
line ``{"ok": true, "sha256"}`` over all ``size`` bytes. A file name is one of engine.wire.storefiles.

HostFacts: ``{"at", "hostname", "uptime_s", "boot_id", "load": [1, 5, 15], "cpus", "memory": {"total",
"available"}, "disks": [{"path", "total", "free", "error"}], "shm": {"total", "free"}, "gpus": [{"index",
"name", "util", "mem_used_mib", "mem_total_mib", "power_w", "temp_c"}], "server": {"url", "ready": bool,
"loads": object | null, "info": object | null, "error"} | null, "runs": [RunStatus]}``.
"""

from __future__ import annotations

STATES = (
    "never-started",
    "starting",
    "running",
    "orphaned",  # the supervisor died, the engine is alive
    "exited",
    "lost-killed",  # both are gone and there is no exit record
    "lost-reboot",  # the boot id differs
)

LIVE = frozenset({"starting", "running", "orphaned"})
ENDED = frozenset({"exited", "lost-killed", "lost-reboot"})

VERBS = (
    "start",
    "status",
    "list",
    "abort",
    "tail",
    "observe",
    "put",
    "probe",
    "server_status",
    "server_plan",
    "store_files",
    "fetch",
)

EXIT_ABORTED = 75
"""The engine's exit status after a graceful stop: everything accepted is durable, some rows are pending."""
