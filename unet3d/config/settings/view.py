"""Settings of `unet3d view`."""

from dataclasses import dataclass
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.values import read_bool, read_int, read_names, read_path


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """What to show, and where."""

    image: Path
    labels: tuple[Path, ...]
    channel: int
    output: Path
    open_browser: bool


def parse_view(composed: ComposedConfig) -> ViewSettings:
    """Check and parse the config of `unet3d view`."""
    config = composed.config
    return ViewSettings(
        image=read_path(config, "image"),
        labels=tuple(map(Path, read_names(config, "labels"))),
        channel=read_int(config, "channel", minimum=0),
        output=read_path(config, "output"),
        open_browser=read_bool(config, "open_browser"),
    )
