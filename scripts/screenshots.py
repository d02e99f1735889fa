"""TensorBoard's pages of a run or a sweep, opened in a real browser and photographed.

python scripts/screenshots.py outputs/pools docs # quality.png, memory.png, speed.png, ...

Needs playwright (pip install playwright) and Debian's chromium. Fails if a page lacks what a run
should show there.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000
CHART = "tf-custom-scalar-multi-line-chart-card"


def browser() -> str | None:
    """The one that is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard on this folder."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(["tensorboard", "--logdir", str(folder), "--port", "0", "--load_fast", "false"])
    yield board.launch()


def custom_scalars(page: Any, address: str, out: Path) -> None:
    """Quality, Memory and Speed: every chart of a page has lines."""
    page.goto(f"{address}#custom_scalars")
    for name in ("Quality", "Memory", "Speed"):
        pane = page.locator("tf-category-paginated-view").filter(has_text=name).first
        pane.wait_for(timeout=PATIENCE_MS)
        if not pane.locator(CHART).first.is_visible():
            pane.locator("button").first.click()
        pane.locator(CHART).first.wait_for(timeout=PATIENCE_MS)
        page.wait_for_timeout(2500)
        charts = pane.locator(CHART).count()
        print(f"{name}: {charts} charts")
        pane.screenshot(path=out / f"{name.lower()}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a run's or a sweep's")
    parser.add_argument("out", type=Path, help="where the pictures go")
    given = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("screenshots need playwright: pip install playwright", file=sys.stderr)
        return 2
    path = browser()
    if path is None:
        print(f"screenshots need a browser: none of {', '.join(BROWSERS)} is here", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    with served(given.folder) as address, sync_playwright() as play:
        window = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = window.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        custom_scalars(page, address, given.out)
        window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
