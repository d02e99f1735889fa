"""A headless browser that records what a page logs and asks for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

ARGUMENTS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
"""Without a GPU, WebGL is drawn in software."""

needs_browser = pytest.mark.skipif(
    find_spec("playwright") is None or shutil.which("chromium") is None,
    reason="needs playwright and chromium",
)


@contextmanager
def open_page(
    url: str, ready: str = "#viewer[data-ready]"
) -> Iterator[tuple[Any, list[str], list[str]]]:
    """Yield a page that shows the element `ready`, its messages, and the URLs it has asked for."""
    from playwright.sync_api import sync_playwright

    messages: list[str] = []
    requests: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 800, "height": 600})
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        page.locator(ready).first.wait_for(timeout=60_000)
        yield page, messages, requests
        browser.close()


def turn_slices(page: Any) -> list[bytes]:
    """Move the slider to the first and the last slice; return a picture of each."""
    slider = page.get_by_role("slider", name="slice")
    pictures = []
    for key in ("Home", "End"):
        slider.focus()
        page.keyboard.press(key)
        page.wait_for_timeout(300)  # drawn in an animation frame
        pictures.append(page.locator("#viewer canvas").screenshot())
    return pictures
