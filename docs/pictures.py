"""Make the pictures of the README from a real run of the demo: `python docs/pictures.py WORKDIR`.

The console is driven without a terminal; everything behind it is the real thing. Sabotage is on, so that a
mismatch is to be seen.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from hsx_tui.app import HsxApp
from hsx_tui.services.demo import default_model_cache
from hsx_tui.services.demo_driver import DemoDriver
from hsx_tui.services.demo_options import DemoOptions

PICTURES = Path(__file__).parent / "pictures"


async def picture(options: DemoOptions, size: tuple[int, int], percent: float, name: str) -> None:
    """Follow the run until it is at ``percent`` (0: the server is loading), then save the screen as SVG."""
    app = HsxApp(DemoDriver(options))
    async with app.run_test(size=size) as pilot:
        for _ in range(3000):
            await pilot.pause(0.1)
            loading, run = app.state.server.loading, app.state.run
            at_work = sum(phase.state == "done" for phase in loading.phases) >= 2
            if percent == 0 and at_work:
                await pilot.pause(0.4)
                break
            if (
                run.progress is not None
                and run.progress.total
                and 100 * run.progress.finished / run.progress.total >= percent > 0
            ):
                await pilot.pause(0.6)
                break
        app.save_screenshot(str(PICTURES / f"{name}.svg"))


async def main(workdir: Path) -> None:
    """All pictures."""
    options = DemoOptions(workdir, default_model_cache(), sabotage="swap", samples=44)
    await picture(options, (120, 36), 0, "loading-120x36")
    await picture(options, (120, 36), 45, "running-120x36")
    await picture(options, (80, 24), 60, "running-80x24")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).absolute()))
