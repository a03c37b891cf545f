"""``python -m benchmarks.fault_matrix``: run the fault matrix, write docs/fault-matrix.md (2 to 4 minutes).

Exit code 1 when a damaged sample was taken or misnamed, or a right one refused; then nothing is written.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from tests.capture.fault_runs import run_matrix
from tests.capture.fault_table import DOCUMENT, markdown, terminal
from tests.demo.harness import start_server, stop_server
from tests.models import tiny_with_tokenizer


def main() -> int:
    """Run, print, write."""
    with tempfile.TemporaryDirectory(prefix="hsx-fault-matrix-") as name:
        place = Path(name)
        model = tiny_with_tokenizer(place / "model")
        (place / "server").mkdir()
        server = start_server(model, place / "server", "--chunked-prefill-size", "64")
        try:
            with (place / "log").open("w") as log, redirect_stdout(log):
                results = run_matrix(place, model, server)
        finally:
            stop_server(server.process)
    print("\n".join(terminal(results)))
    wrong = results.wrong()
    if wrong or results.good.refused or results.win_rate_good.refused:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    DOCUMENT.write_text("".join(f"{line}\n" for line in markdown(results)))
    print(f"written: {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
