"""Take pictures of a run's report and of the viewer of volumes.

    python -m scripts.docs.report_pictures outputs/hippocampus docs/images IMAGE LABELS ...

Writes report.png and viewer.png. Needs playwright (pip install playwright) and chromium.
"""

import argparse
import threading
from pathlib import Path
from typing import Any

from scripts.docs.screenshots import find_browser
from unet3d.workflows.view import build_server

WEBGL = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")
TIMEOUT_MS, SETTLE_MS = 60_000, 1000


def capture(page: Any, url: str, path: Path) -> None:
    """Capture a page when its viewer is ready."""
    page.goto(url)
    page.locator("#viewer[data-ready]").wait_for(timeout=TIMEOUT_MS)
    page.wait_for_timeout(SETTLE_MS)  # drawn in animation frames
    page.screenshot(path=path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.docs.report_pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("output", type=Path, help="folder of the pictures")
    parser.add_argument("image", type=Path)
    parser.add_argument("labels", type=Path, nargs="*")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    report = (options.run / "report.html").resolve().as_uri()
    with (
        sync_playwright() as play,
        build_server(options.image, options.labels, channel=0, port=0) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        window = play.chromium.launch(executable_path=find_browser(), args=[*WEBGL])
        for name, url, height in (("report", report, 1330), ("viewer", server.url, 800)):
            page = window.new_page(viewport={"width": 1180, "height": height})
            capture(page, url, options.output / f"{name}.png")
        window.close()
        server.shutdown()


if __name__ == "__main__":
    main()
