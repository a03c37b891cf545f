"""Every cause with what decides it, why it happens, what would confirm it and what to do: the one place that
says so. The console shows it, and docs/causes.md is made of it (``python -m benchmarks.causes``).

Standard library only: the console reads it too.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.wire.causes import MEANING, Cause

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Entry:
    """A cause, for a person who has it in front of him.

    Attributes:
        evidence: what decides it, and nothing less.
        likely: the usual reason.
        confirm: what would prove that reason.
        action: what the run does, then what the person should do.
    """

    cause: Cause
    evidence: str
    likely: str
    confirm: str
    action: str

    @property
    def meaning(self) -> str:
        """In a few words."""
        return MEANING[self.cause]


_RETRY = "Refused and asked for again under a new request id; quarantined after the last attempt."

_ENTRIES = (
    Entry(
        Cause.STALE,
        "The file's dump_id is not the one that the reply promised; or its request id is another "
        "attempt at the "
        "same row; or, by recomputation, most wrong rows are those of a sample that was answered before.",
        "A file of an earlier attempt was left behind, or a buffer of an earlier forward was read again.",
        "The evidence names the earlier dump or row; its states are the same.",
        f"{_RETRY} If it comes back: empty the dump folder while the server is stopped; never share it "
        "between "
        "servers.",
    ),
    Entry(
        Cause.FOREIGN,
        "The reply's id, the handshake's file name or the request id inside the file is another request's.",
        "Two clients use one dump folder, or something renames files in it.",
        "The request id in the evidence: whose is it?",
        f"{_RETRY} Give each server and each run its own private folder.",
    ),
    Entry(
        Cause.DECODE_STEP,
        "One row (of ids or of states) where the prompt has more, and no chunk list that makes it a "
        "cached prefix.",
        'The capture took a decode step: the row of a generated token (the origin\'s "got 1 tokens").',
        "The one id is not the prompt's first; with max_new_tokens 1 it goes away.",
        f"{_RETRY} Counter-numbered dumps have such folders by nature; else mend the capture: prefill only.",
    ),
    Entry(
        Cause.PARTIAL_CHUNK,
        "Fewer rows than tokens, or chunks that do not join without a gap, and the first one begins at "
        "0; or the "
        "ids are a piece of the prompt that the writer calls longer.",
        "A chunked prefill of which a chunk was lost, or was written by itself.",
        "The chunk list in the evidence; the missing rows begin at a multiple of the server's chunk size.",
        f"{_RETRY} If it stays: raise --chunked-prefill-size above the longest sample.",
    ),
    Entry(
        Cause.PREFIX_CACHED,
        "The first chunk begins behind 0, or ids and rows are the prompt's end alone: so many rows "
        "were never "
        "computed.",
        "The prefix cache answered for the beginning (extra_key ignored by an old server).",
        "missing_prefix in the evidence is the length that this sample shares with an earlier one.",
        f"{_RETRY} If it stays: start the server with --disable-radix-cache.",
    ),
    Entry(
        Cause.NEIGHBOUR,
        "By recomputation: some rows, not all, are those of a sample that was in flight at the same "
        "time; or a "
        "block of wrong rows stands at the end and is nobody's of ours; or there are more rows than tokens.",
        "The packed batch was cut at a wrong length.",
        "The same row alone is right; the evidence names the neighbour.",
        f"{_RETRY} If it comes often: the capture's lengths are wrong (speculation on? padding?); lower "
        "max_running_requests to 1 to go on meanwhile.",
    ),
    Entry(
        Cause.SHIFTED,
        "By recomputation: most wrong rows are this sample's own, a fixed number of places away. By "
        "win rate: one "
        "place beside fits at 0.85 or more, and in place does not.",
        "The packed batch was cut at a wrong start; or states of position i+1 are written for i.",
        "A retake alone is right (a wrong start) or equally shifted (the capture's own convention).",
        f"{_RETRY} If all samples have it: the capture is off by that number; stop and mend it.",
    ),
    Entry(
        Cause.SWAPPED,
        "By recomputation: all rows, but for a shared prefix, are those of a sample in flight at the "
        "same time.",
        "Two requests of one forward got each other's outputs (sglang#4997).",
        "The other sample, named in the evidence, has this one's rows.",
        f"{_RETRY} If it comes often: report the server's version; take samples one at a time.",
    ),
    Entry(
        Cause.DUPLICATE,
        "The bytes of all taps equal those of another sample of this run that has other ids, and "
        "evidence did not "
        "prove this one.",
        "One buffer was written for two requests. (Where recomputation is possible it says swapped or "
        "stale.)",
        "A lone retake of both rows: which of the two changes?",
        f"{_RETRY} The other row is named: verify it, too.",
    ),
    Entry(
        Cause.LATE,
        "No answer within the run's timeout, from a server that says it is ready; or a "
        "counter-numbered dump that "
        "landed after its answer was given up.",
        "The request is stuck in the server's queue, or the timeout is shorter than the longest sample "
        "needs.",
        "The server's log and queue length at that time.",
        f"The request is aborted by its whole id. {_RETRY} Raise the timeout, or lower the concurrency.",
    ),
    Entry(
        Cause.TRUNCATED_INPUT,
        "The reply counts fewer prompt tokens than were sent, the server refuses the length, or the "
        "dump's ids are "
        "the beginning of the prompt and the writer knows no more.",
        "The sample is longer than the server's context (auto-truncate is on), or than max_tokens.",
        "got and expected: got is the server's context less a few, the same in every such mismatch.",
        "Refused; a row over the limit is set aside before it is asked for. Raise --context-length or "
        "shorten it.",
    ),
    Entry(
        Cause.IDS_DIFFER,
        "The ids that the forward saw (or their digest) are not the sample's at some position, and neither a "
        "beginning nor an end of it.",
        "The server tokenised text again, added a BOS, or the dump is another request's (then whole).",
        "position, got_ids and expected_ids in the evidence.",
        f"{_RETRY} If all samples have it at position 0: the server adds a token.",
    ),
    Entry(
        Cause.WRONG_LAYERS,
        "The writer names other layers than the taps; or the wanted last state is not there; or, by "
        "recomputation, "
        "the lowest tap's place holds the output of another layer, or another tap's place holds the "
        "lowest tap's.",
        "The server was started with other layer ids, or converts them by a rule of its own (+1).",
        "The layers in the evidence; preflight lists both conventions.",
        f"{_RETRY} Every sample will have it: stop, start the server with the run's taps.",
    ),
    Entry(
        Cause.WRONG_WIDTH,
        "A tensor is not [tokens, taps x hidden size] (or [tokens, hidden size] for last), or not of rank 2.",
        "A tap was dropped by the model file, the model is another one, or TP shards were not joined.",
        "got / hidden size = the number of taps that arrived.",
        f"{_RETRY} Every sample will have it: check the taps against the model's number of layers.",
    ),
    Entry(
        Cause.WRONG_DTYPE,
        "A tensor's dtype is not the one in which the server says that it computes.",
        "The capture casts, or the server was restarted with another --dtype.",
        "/server_info's dtype against got.",
        f"{_RETRY} Restart the run so that the settings are read again.",
    ),
    Entry(
        Cause.NON_FINITE,
        "A NaN or an infinity in a tap or in the wanted last state (where and first_row say which).",
        "An overflow in half precision, or a fault of a kernel (delta-rule layers are known for it).",
        "The same row alone, and in float32.",
        f"{_RETRY} If one row keeps it: the model does it, leave the row out. If many: change the "
        "kernel or dtype.",
    ),
    Entry(
        Cause.ZERO_ROWS,
        "A row of which every number is zero, in a tap or in the wanted last state.",
        "A buffer that was never filled, or an intermediate of another shape (hybrid models).",
        "where: is it always the same tap?",
        f"{_RETRY} If always one tap: that layer's state is not captured; choose another tap.",
    ),
    Entry(
        Cause.REPEATED_STATES,
        "Two neighbouring rows of different tokens are equal to the bit in one tensor.",
        "A row was broadcast or copied twice: the cut used a wrong stride.",
        "where and first_row: a whole tail of equal rows, or one pair?",
        f"{_RETRY} If it stays: the capture's indexing is wrong; stop.",
    ),
    Entry(
        Cause.UNREADABLE,
        "The file is no private regular safetensors file of a known format version with all its parts; "
        "or the reply "
        "is not SGLang's.",
        "A full /dev/shm cut it short, another program wrote it, or the server's plugin is newer than "
        "the engine.",
        "The reason in the evidence; df of the dump folder.",
        f"{_RETRY} Make room, or deploy the engine again.",
    ),
    Entry(
        Cause.MISSING,
        "The reply promised a file and it did not come within 20 s; or a row was lost again and again, "
        "or refused "
        "with another status, by a server that is ready.",
        "The writer is behind or dead; the folder on the host is not the one that the server writes to.",
        "Is the plugin's process alive (plugin-<pid>.json)? Is dump_dir the same path for both?",
        f"{_RETRY} Correct dump_dir; look at the server's log for the writer.",
    ),
    Entry(
        Cause.NO_HANDSHAKE,
        "The answer is right and has no hsx in its meta_info.",
        "The capture plugin is not loaded, or its hooks do not fit this SGLang version.",
        "plugin-<pid>.json in the dump folder; the server's log at start.",
        f"{_RETRY} Every sample will have it: start the server with the plugin.",
    ),
    Entry(
        Cause.WRITER_ERROR,
        "The handshake or the error file says that the plugin could not write the dump, and why.",
        "No room in the dump folder, a backlog, or the server is shutting down.",
        "got is the writer's own text.",
        f"{_RETRY} Make room or lower the concurrency.",
    ),
    Entry(
        Cause.EVIDENCE_LOW,
        "The numbers do not fit the ids, and nothing tells whose they are: rows of the lowest tap "
        "differ from the "
        "recomputation; norm(pre) is not last; or a lone retake differs.",
        "States of a request that is not ours, reordered or scaled rows, another model's weights, "
        "quantisation.",
        "wrong_rows, first_row..last_row, value and whose; all samples or a few?",
        f"{_RETRY} If all samples have it: the server has other weights or dtype than target.model. If "
        "a few: keep "
        "the quarantine's states and report them.",
    ),
)

TABLE: dict[Cause, Entry] = {entry.cause: entry for entry in _ENTRIES}
"""Complete: every cause has an entry (tests/capture/test_cause_table.py)."""


_INTRODUCTION = """A dump that is not its sample's has one cause of this closed list. The page is made of
engine/wire/cause_table.py by `python -m benchmarks.causes`; [fault-matrix.md](fault-
matrix.md) shows that each cause is found. Dumps are judged in this order, and the first
thing that is wrong is named: the reply; the file; what the writer says
(engine/capture/classify.py); request id, ids, layers, width, rows, dtype and values
(engine/capture/checks.py); the numbers against a recomputation
(engine/capture/evidence.py)."""


def markdown() -> Iterator[str]:
    """The lines of docs/causes.md."""
    yield "# Causes of a mismatch"
    yield ""
    yield from textwrap.wrap(_INTRODUCTION, 118)
    for entry in TABLE.values():
        yield ""
        yield f"## {entry.cause.value}"
        yield ""
        yield f"{entry.meaning[0].upper()}{entry.meaning[1:]}."
        yield ""
        yield f"- **Decided by**: {entry.evidence}"
        yield f"- **Likely reason**: {entry.likely}"
        yield f"- **What would confirm it**: {entry.confirm}"
        yield f"- **What is done, and what to do**: {entry.action}"
