"""How far a server is with loading: engine.wire.loading, under the name that the screens know."""

from engine.wire.loading import (
    OPTIONAL,
    PHASES,
    QUIET_AFTER_S,
    Loading,
    Phase,
    fatal,
    read_line,
    split_stamp,
)

__all__ = ["OPTIONAL", "PHASES", "QUIET_AFTER_S", "Loading", "Phase", "fatal", "read_line", "split_stamp"]
