"""Make the pictures of the documents from the commands that the pages name.

    pip install playwright && playwright install chromium
    python -m scripts.docs.pictures      # five minutes; needs no data

Without Playwright, only the figures are made that commands draw. The scans of the hippocampus and
the viewer need data: the commands are on the pages that show them.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from scripts.bench.results import ROOT

FIGURES = {
    "timeline.png": "memory experiment=example_small view=timeline format=png output={file}",
    "comparison.png": "compare {runs} figure={file}",
}
"""Figures by name, with the command that draws each."""

CATEGORIES = ("quality.png", "memory.png", "speed.png")
"""Pictures of the categories of TensorBoard's Custom Scalars tab, in its order."""


def draw_figures(runs: Path, folder: Path) -> None:
    """Draw what commands draw; `runs` is the folder of a sweep."""
    for name, command in FIGURES.items():
        words = command.format(file=folder / name, runs=runs).split()
        subprocess.run([sys.executable, "-m", "unet3d", *words], check=True)


def photograph(runs: Path, folder: Path) -> None:
    """Photograph the report of a run, and the curves of all runs in TensorBoard."""
    from playwright.sync_api import sync_playwright
    from tensorboard.program import TensorBoard

    server = TensorBoard()
    server.configure(logdir=str(runs), port=0)
    address = server.launch()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"))
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"{address}?darkMode=false#custom_scalars", wait_until="networkidle")
        page.wait_for_timeout(3000)
        for n, name in enumerate(CATEGORIES):
            page.locator("tf-category-paginated-view").nth(n).screenshot(path=folder / name)
        page.set_viewport_size({"width": 1100, "height": 900})
        page.goto((runs / "0" / "report.html").absolute().as_uri())
        page.screenshot(path=folder / "report.png")
        browser.close()


def main() -> None:
    folder = Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs" / "images")
    with TemporaryDirectory() as temporary:
        runs = Path(temporary)
        sweep = ["-m", "model.width=4,8,16", "trainer.max_epochs=10", f"output={runs}"]
        subprocess.run([sys.executable, "-m", "unet3d", "train", *sweep], check=True)
        draw_figures(runs, folder)
        if find_spec("playwright"):
            photograph(runs, folder)


if __name__ == "__main__":
    main()
