"""The console on a recording, as a program of its own: ``python -m tests.tui.replay_app FILE``."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from hsx_tui.app import HsxApp
from hsx_tui.model.replay import ReplayDriver, load


def main() -> int:
    """Run until it is quit; the exit code is the application's."""
    app = HsxApp(ReplayDriver(load(Path(sys.argv[1])), speed=math.inf), ascii="--ascii" in sys.argv)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    raise SystemExit(main())
