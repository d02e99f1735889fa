"""`unet3d download task=Task04_Hippocampus`: download a Decathlon task for data=decathlon."""

from dataclasses import dataclass
from pathlib import Path

from unet3d.app import show_progress
from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import read_settings
from unet3d.config.keys import suggest_name
from unet3d.data.layouts.download import download, extract, get_task_urls
from unet3d.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """Which task to download."""

    task: str
    root: Path
    url: str | None
    md5: str | None


def main(composed: ComposedConfig, folder: Path) -> int:
    """Download, verify and unpack a task, unless its folder exists."""
    settings = read_settings(DownloadConfig, composed.config)
    url, md5 = resolve_download(settings)
    target = settings.root / settings.task
    if target.exists():
        print(f"{target} already exists: nothing to do")
        return 0
    archive = target.with_name(f"{settings.task}.tar.part")
    with show_progress("B downloaded") as progress:
        download(url, md5, archive, progress)
    with show_progress("B unpacked") as progress:
        extract(archive, target, progress)
    archive.unlink()
    print(f"{target}: train with data=decathlon data.root={target}")
    return 0


def resolve_download(settings: DownloadConfig) -> tuple[str, str]:
    """Return URL and checksum: the given ones, or MONAI's for its ten tasks."""
    task, url, md5 = settings.task, settings.url, settings.md5
    if url is not None and md5 is not None:
        return url, md5
    known = get_task_urls()
    if task not in known:
        raise UsageError(
            f"task must be one of {', '.join(known)}, or another one with url= and md5=, got "
            f"{task}{suggest_name(task, known)}"
        )
    return url or known[task][0], md5 or known[task][1]
