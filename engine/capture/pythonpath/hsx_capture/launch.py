"""``python -E .../hsx_capture/launch.py ARGS``: sglang.launch_server where PYTHONPATH is ignored.

With -E or -I an interpreter and all that it spawns do not look at PYTHONPATH; a child process does get its
parent's sys.path, so it is enough to put this folder there.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent), *(p for p in sys.path if Path(p).resolve() != here)]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
