"""Take screenshots of a run or a sweep in TensorBoard.

    python -m scripts.docs.screenshots outputs/widths docs/images   # quality.png, memory.png, ...

Needs playwright (pip install playwright) and chromium. Fails if a page does not show what it should
for a run.
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
TIMEOUT_MS, SETTLE_MS = 60_000, 1500
CHART = "tf-custom-scalar-multi-line-chart-card"


def find_browser() -> str | None:
    """Return the path of an installed browser; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def serve(folder: Path) -> Generator[str]:
    """Serve a folder with TensorBoard; yield the address."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(["tensorboard", "--logdir", str(folder), "--port", "0", "--load_fast", "false"])
    yield board.launch()


def capture_charts(page: Any, address: str, output: Path) -> None:
    """Capture Quality, Memory and Speed, once each chart has at least one line."""
    page.goto(f"{address}#custom_scalars")
    page.locator(CHART).first.wait_for(timeout=TIMEOUT_MS)
    panes = page.locator("tf-category-paginated-view")
    for name in ("Quality", "Memory", "Speed"):
        pane = panes.filter(has=page.get_by_text(name, exact=True)).first
        pane.scroll_into_view_if_needed()
        charts = pane.locator(CHART)
        for n in range(charts.count()):
            matches = charts.nth(n).get_by_text(re.compile(r"Matches \([1-9]"))
            matches.wait_for(timeout=TIMEOUT_MS)
        page.wait_for_timeout(SETTLE_MS)  # lines are drawn in animation frames
        pane.screenshot(path=output / f"{name.lower()}.png")
        print(f"{name}: {charts.count()} charts")


def capture_images(page: Any, address: str, output: Path) -> None:
    """Capture the cases with reference and prediction, and the memory of a step."""
    page.goto(f"{address}#images")
    panes = page.locator("tf-category-paginated-view")
    for name, file in (("cases", "cases"), ("memory", "step")):
        pane = panes.filter(has=page.get_by_text(name, exact=True)).first
        pane.scroll_into_view_if_needed()
        picture = pane.locator("tf-image-loader img").first
        picture.wait_for(timeout=TIMEOUT_MS)
        page.wait_for_timeout(SETTLE_MS)
        pane.screenshot(path=output / f"{file}.png")
        print(f"{name}: {pane.locator('tf-image-loader').count()} pictures")


def capture_hparams(page: Any, address: str, output: Path) -> None:
    """Capture the table of runs with their hyperparameters and final metrics."""
    page.goto(f"{address}#hparams")
    for word in ("model", "final/dice", "final/peak_mib", "final/step_seconds"):
        page.get_by_text(word, exact=True).first.wait_for(timeout=TIMEOUT_MS)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=output / "hparams.png")
    print("hparams: Dice, peak and seconds")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.docs.screenshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of a run or a sweep")
    parser.add_argument("output", type=Path, help="folder of the images")
    options = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("screenshots need playwright: pip install playwright", file=sys.stderr)
        return 2
    path = find_browser()
    if path is None:
        print(f"screenshots need a browser: install {' or '.join(BROWSERS)}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    with serve(options.folder) as address, sync_playwright() as play:
        window = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for capture, width, height in (
            (capture_charts, 1500, 2600),
            (capture_images, 1500, 2600),
            (capture_hparams, 1700, 900),
        ):
            page = window.new_page(viewport={"width": width, "height": height})
            capture(page, address, options.output)
            page.close()
        window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
