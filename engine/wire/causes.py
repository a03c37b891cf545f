"""Why a dump is not its sample's: a closed list, each with what it means (formats.md)."""

from __future__ import annotations

import enum


class Cause(str, enum.Enum):
    """The cause of a mismatch."""

    STALE = "stale"
    FOREIGN = "foreign"
    DECODE_STEP = "decode_step"
    PARTIAL_CHUNK = "partial_chunk"
    PREFIX_CACHED = "prefix_cached"
    NEIGHBOUR = "neighbour"
    SHIFTED = "shifted"
    SWAPPED = "swapped"
    DUPLICATE = "duplicate"
    LATE = "late"
    TRUNCATED_INPUT = "truncated_input"
    IDS_DIFFER = "ids_differ"
    WRONG_LAYERS = "wrong_layers"
    WRONG_WIDTH = "wrong_width"
    WRONG_DTYPE = "wrong_dtype"
    NON_FINITE = "non_finite"
    ZERO_ROWS = "zero_rows"
    REPEATED_STATES = "repeated_states"
    UNREADABLE = "unreadable"
    MISSING = "missing"
    NO_HANDSHAKE = "no_handshake"
    WRITER_ERROR = "writer_error"
    EVIDENCE_LOW = "evidence_low"


MEANING: dict[Cause, str] = {
    Cause.STALE: "the states are those of an earlier request",
    Cause.FOREIGN: "the dump carries another request's id",
    Cause.DECODE_STEP: "one row: a decode step was written instead of the prompt",
    Cause.PARTIAL_CHUNK: "only a part of a chunked prefill arrived",
    Cause.PREFIX_CACHED: "the first rows came from the prefix cache and were not computed",
    Cause.NEIGHBOUR: "some rows belong to another request of the same forward",
    Cause.SHIFTED: "every row is the one before or after it",
    Cause.SWAPPED: "the states are those of another request in flight",
    Cause.DUPLICATE: "the states equal those of a sample with other tokens",
    Cause.LATE: "the answer came after the deadline",
    Cause.TRUNCATED_INPUT: "the server saw fewer tokens than were sent",
    Cause.IDS_DIFFER: "the forward pass saw other token ids",
    Cause.WRONG_LAYERS: "the server captured other layers than asked",
    Cause.WRONG_WIDTH: "a row is not taps x hidden size wide",
    Cause.WRONG_DTYPE: "the numbers have another type than declared",
    Cause.NON_FINITE: "there are NaN or infinite values",
    Cause.ZERO_ROWS: "there are rows of zeros",
    Cause.REPEATED_STATES: "neighbouring rows of different tokens are equal",
    Cause.UNREADABLE: "the dump cannot be read",
    Cause.MISSING: "the server answered but no dump appeared",
    Cause.NO_HANDSHAKE: "the server answered without naming a dump: the capture plugin is not active",
    Cause.WRITER_ERROR: "the capture plugin could not write the dump",
    Cause.EVIDENCE_LOW: "the states do not fit the token ids",
}


class Outcome(str, enum.Enum):
    """What was done about a mismatch."""

    RETRIED = "retried"
    QUARANTINED = "quarantined"
