"""Tasks of the Medical Segmentation Decathlon: fetched, checked, unpacked whole or not at all."""

import errno
import hashlib
import shutil
import tarfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from unet3d.errors import RunError, UsageError
from unet3d.units import MIB

SECONDS = 30
"""Without a byte for so long, the network is taken to be gone."""

Progress = Callable[[int, int], None]
"""Told what is done, and of how much."""


def task_urls() -> dict[str, tuple[str, str]]:
    """(address, MD5) of every task, as MONAI has them."""
    from monai.apps import DecathlonDataset

    return {
        task: (url, DecathlonDataset.md5[task]) for task, url in DecathlonDataset.resource.items()
    }


def download(url: str, md5: str, part: Path, progress: Progress) -> None:
    """Have the whole of `url` in `part`; what is there of it already is not fetched again."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"url must begin with http:// or https://, got {url}")
    part.parent.mkdir(parents=True, exist_ok=True)
    with report_disk_full(part):
        _receive(url, part, progress)
    with part.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        part.unlink()
        raise RunError(f"{url} has MD5 {found}, expected {md5}: removed, the next try begins anew")


def _receive(url: str, part: Path, progress: Progress) -> None:
    done = part.stat().st_size if part.exists() else 0
    total = None
    try:
        request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})
        with urlopen(request, timeout=SECONDS) as answer, part.open("ab") as file:
            if done and answer.status != 206:  # the server sends all of it, asked for the rest
                file.truncate(0)
                done = 0
            length = answer.headers["Content-Length"]
            total = None if length is None else done + int(length)
            while block := answer.read(MIB):
                file.write(block)
                done += len(block)
                progress(done, total or done)
    except HTTPError as error:
        if error.code == 416:  # no rest: all of it is there, or more, as the checksum will tell
            return
        raise RunError(f"{url} answers {error.code} {error.reason}") from error
    except (HTTPException, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = getattr(error, "reason", None) or error
        raise _cut_off(url, part, f"cannot be fetched: {reason}") from error
    if total is not None and done < total:
        raise _cut_off(url, part, f"ended after {done:,} of {total:,} bytes")


def _cut_off(url: str, part: Path, what: str) -> RunError:
    if not part.exists():
        return RunError(f"{url} {what}")
    size = part.stat().st_size / MIB
    return RunError(
        f"{url} {what}; the same command goes on from the {size:.1f} MiB that are in {part}"
    )


def extract(archive: Path, folder: Path, progress: Progress) -> None:
    """Make `folder` from the folder of the same name in a tar archive: all of it or nothing.

    Only plain files are taken; a link, a device or a path that leads outside stops it.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    try:
        with report_disk_full(folder), tarfile.open(archive) as tar:
            total = archive.stat().st_size
            for member in tar:
                _extract(tar, member, draft)
                progress(min(tar.offset, total), total)
        if not (draft / folder.name / "dataset.json").is_file():
            raise RunError(f"{archive} holds no {folder.name}/dataset.json")
        (draft / folder.name).rename(folder)
    except tarfile.TarError as error:
        raise RunError(f"{archive} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, draft: Path) -> None:
    target = (draft / member.name).resolve()
    if not target.is_relative_to(draft.resolve()):
        raise RunError(f"{tar.name} wants to write outside of its folder: {member.name}")
    if member.isdir():
        return
    content = tar.extractfile(member) if member.isfile() else None
    if content is None:
        raise RunError(f"{tar.name} holds {member.name}, which is no plain file")
    if target.name.startswith("._"):  # what macOS adds to archives
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file, MIB)


@contextmanager
def report_disk_full(path: Path) -> Generator[None]:
    """Say in one line that the disk is full, and where."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free / MIB
        raise RunError(
            f"{path.parent.absolute()}: no space left on the disk ({free:.0f} MiB are free); make "
            "room, and the same command goes on"
        ) from error
