"""`unet3d download task=Task04_Hippocampus`: a task of the Decathlon, ready for data=decathlon."""

from difflib import get_close_matches
from pathlib import Path

from unet3d.cli.progress import Progress
from unet3d.config.compose import ComposedConfig
from unet3d.data.layouts.download import download, extract, task_urls
from unet3d.errors import UsageError


def main(request: ComposedConfig, folder: Path) -> int:
    """Fetch, check and unpack, unless it is there."""
    cfg = request.config
    url, md5 = resolve_download(cfg.task, cfg.url, cfg.md5)
    target = Path(cfg.root) / cfg.task
    if target.exists():
        print(f"{target} is there already: nothing to do")
        return 0
    part = target.with_name(f"{cfg.task}.tar.part")
    with Progress("bytes fetched") as progress:
        download(url, md5, part, progress)
    with Progress("bytes unpacked") as progress:
        extract(part, target, progress)
    part.unlink()
    print(f"{target}: train with data=decathlon data.root={target}")
    return 0


def resolve_download(task: str | None, url: str | None, md5: str | None) -> tuple[str, str]:
    """The address and the checksum: given, or MONAI's for its ten tasks."""
    if task is not None and url is not None and md5 is not None:
        if Path(task).name != task:
            raise UsageError(f"task must be the name of a folder, got {task!r}")
        return url, md5
    known = task_urls()
    if task not in known:
        near = get_close_matches(str(task), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"task must be one of {', '.join(known)}, or another with url= and md5=; "
            f"got {task}{hint}"
        )
    return url or known[task][0], md5 or known[task][1]
