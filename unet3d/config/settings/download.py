"""Settings of `unet3d download`."""

from dataclasses import dataclass
from pathlib import Path

from unet3d.config.compose import ComposedConfig
from unet3d.config.values import read_optional_str, read_path, read_str


@dataclass(frozen=True, kw_only=True)
class DownloadSettings:
    """Which task to download."""

    task: str
    root: Path
    url: str | None
    md5: str | None


def parse_download(composed: ComposedConfig) -> DownloadSettings:
    """Check and parse the config of `unet3d download`."""
    config = composed.config
    return DownloadSettings(
        task=read_str(config, "task"),
        root=read_path(config, "root"),
        url=read_optional_str(config, "url"),
        md5=read_optional_str(config, "md5"),
    )
