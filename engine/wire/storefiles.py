"""Which files a store may have: the only names that one side asks for and the other side gives."""

from __future__ import annotations

import re

from engine.wire.errors import SpecError

_NAME = re.compile(
    r"(?:manifest\.json|index\.jsonl|attempts\.jsonl|norm\.safetensors"
    r"|shards/\d{6,12}\.safetensors|quarantine/\d{8,12}\.(?:json|safetensors))\Z"
)
FOLDERS = ("shards", "quarantine")
GROWING = frozenset({"index.jsonl", "attempts.jsonl"})
"""Files that lines are appended to; every other one is written whole, once."""


def check_name(name: object) -> str:
    """``name`` if a store may have such a file. Raises SpecError."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise SpecError(f"{name!r:.80} is no file of a store", "it is named in docs/formats.md")
    return name


def is_name(name: object) -> bool:
    """Whether a store may have such a file."""
    return isinstance(name, str) and _NAME.match(name) is not None
