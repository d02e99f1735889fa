"""TensorBoard's pages of a run or a sweep, opened in a real browser and photographed.

python -m scripts.docs.screenshots outputs/pools docs # quality.png, memory.png, cases.png, ...

Needs playwright (pip install playwright) and Debian's chromium. Fails if a page does not show
what it should for a run.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS, SETTLE_MS = 60_000, 1500
CHART = "tf-custom-scalar-multi-line-chart-card"


def browser() -> str | None:
    """The one that is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def served(folder: Path) -> Generator[str]:
    """The address of a TensorBoard on this folder."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(["tensorboard", "--logdir", str(folder), "--port", "0", "--load_fast", "false"])
    yield board.launch()


def pages(page: Any, address: str, out: Path) -> None:
    """Quality, Memory and Speed: each has its charts, and each chart a line at least."""
    page.goto(f"{address}#custom_scalars")
    page.locator(CHART).first.wait_for(timeout=PATIENCE_MS)
    panes = page.locator("tf-category-paginated-view")
    for name in ("Quality", "Memory", "Speed"):
        pane = panes.filter(has=page.get_by_text(name, exact=True)).first
        pane.scroll_into_view_if_needed()
        charts = pane.locator(CHART)
        for n in range(charts.count()):
            matches = charts.nth(n).get_by_text(re.compile(r"Matches \([1-9]"))
            matches.wait_for(timeout=PATIENCE_MS)
        page.wait_for_timeout(SETTLE_MS)  # lines are drawn in animation frames
        pane.screenshot(path=out / f"{name.lower()}.png")
        print(f"{name}: {charts.count()} charts")


def images(page: Any, address: str, out: Path) -> None:
    """Cases with reference and prediction, and what a step takes."""
    page.goto(f"{address}#images")
    panes = page.locator("tf-category-paginated-view")
    for name, wanted in (("cases", "cases"), ("memory", "step")):
        pane = panes.filter(has=page.get_by_text(name, exact=True)).first
        pane.scroll_into_view_if_needed()
        picture = pane.locator("tf-image-loader img").first
        picture.wait_for(timeout=PATIENCE_MS)
        page.wait_for_timeout(SETTLE_MS)
        pane.screenshot(path=out / f"{wanted}.png")
        print(f"{name}: {pane.locator('tf-image-loader').count()} pictures")


def hparams(page: Any, address: str, out: Path) -> None:
    """Runs in a table, by what they are and what they reached."""
    page.goto(f"{address}#hparams")
    for word in ("model", "final/dice", "final/peak_mib", "final/step_seconds"):
        page.get_by_text(word, exact=True).first.wait_for(timeout=PATIENCE_MS)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=out / "hparams.png")
    print("hparams: Dice, peak and seconds")


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
        for look, width, height in (
            (pages, 1500, 2600),
            (images, 1500, 2600),
            (hparams, 1700, 900),
        ):
            page = window.new_page(viewport={"width": width, "height": height})
            look(page, address, given.out)
            page.close()
        window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
