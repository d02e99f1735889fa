"""Settings of `unet3d view`."""

from dataclasses import dataclass
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.values import read_bool, read_int, read_names, read_path
from unet3d.errors import UsageError

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """What to show, and where."""

    image: Path
    labels: tuple[Path, ...]
    channel: int
    port: int  # 0: any free one
    open_browser: bool


def parse_view(composed: ComposedConfig) -> ViewSettings:
    """Check and parse the config of `unet3d view`."""
    config = composed.config
    port = read_int(config, "port", minimum=0)
    if port > MAX_PORT:
        raise UsageError(f"port must be at most {MAX_PORT}, got {port}")
    return ViewSettings(
        image=read_path(config, "image"),
        labels=tuple(map(Path, read_names(config, "labels"))),
        channel=read_int(config, "channel", minimum=0),
        port=port,
        open_browser=read_bool(config, "open_browser"),
    )
