"""`unet3d view IMAGE [LABELS ...]`: look at volumes in a browser on this machine."""

import os
import signal
import sys
import webbrowser
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.view import parse_view
from unet3d.workflows.view import build_server


def main(composed: ComposedConfig, folder: Path) -> int:
    """Serve the viewer until Ctrl-C."""
    settings = parse_view(composed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    with build_server(
        settings.image, settings.labels, channel=settings.channel, port=settings.port
    ) as server:
        print(f"{server.url}\nonly on this machine, until Ctrl-C", flush=True)
        if settings.open_browser and has_screen():
            webbrowser.open(server.url)
        server.serve_forever()
    return 0


def has_screen() -> bool:
    """Return whether a browser would open a window, and not take over the terminal."""
    known = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return bool(known) or sys.platform in ("darwin", "win32")
