"""`unet3d view IMAGE [LABELS ...]`: look at volumes in a browser."""

import os
import sys
import webbrowser
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.view import parse_view
from unet3d.workflows.view import write_view_page


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write the page, print its path and open it."""
    settings = parse_view(composed)
    write_view_page(settings.image, settings.labels, settings.output, channel=settings.channel)
    print(settings.output)
    if settings.open_browser and has_screen():
        webbrowser.open(settings.output.resolve().as_uri())
    return 0


def has_screen() -> bool:
    """Return whether a browser would open a window, and not take over the terminal."""
    known = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return bool(known) or sys.platform in ("darwin", "win32")
