"""The source that a run's specification asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.sources.legacy import LegacySource
from engine.sources.sglang import SGLangSource

if TYPE_CHECKING:
    from engine.sources.protocol import Source
    from engine.wire.spec import ExtractSpec


def open_source(spec: ExtractSpec) -> Source:
    """A source that is not connected yet. Raises UsageError."""
    if spec.source.dump_mode == "counter":
        return LegacySource(spec)
    return SGLangSource(spec.source, spec.concurrency, spec.target.taps)
