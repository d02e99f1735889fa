"""`unet3d view IMAGE [LABELS ...]`: look at volumes in a browser."""

import os
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import integer, read_settings
from unet3d.workflows.view import write_view_page


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """What to show, and where."""

    image: Path
    labels: tuple[str, ...]  # files
    channel: Annotated[int, integer(">= 0")]
    output: Path
    open_browser: bool


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write the page, print its path and open it."""
    settings = read_settings(ViewSettings, composed.config)
    write_view_page(
        settings.image, [*map(Path, settings.labels)], settings.output, channel=settings.channel
    )
    print(settings.output)
    if settings.open_browser and has_screen():
        webbrowser.open(settings.output.resolve().as_uri())
    return 0


def has_screen() -> bool:
    """Return whether a browser would open a window, and not take over the terminal."""
    known = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return bool(known) or sys.platform in ("darwin", "win32")
