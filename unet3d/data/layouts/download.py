"""Download, verify and extract tasks of the Medical Segmentation Decathlon.

Downloads resume, which those of torch.hub and MONAI do not; archives are extracted completely or
not at all.
"""

import errno
import hashlib
import shutil
import tarfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from unet3d.errors import RunError, UsageError
from unet3d.files import name_file
from unet3d.text import MIB

TIMEOUT_SECONDS = 30
"""Time without a byte after which the connection counts as lost."""

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


def get_task_urls() -> dict[str, tuple[str, str]]:
    """Return (URL, MD5) of every task, from MONAI."""
    from monai.apps import DecathlonDataset

    return {
        task: (url, DecathlonDataset.md5[task]) for task, url in DecathlonDataset.resource.items()
    }


def download(url: str, md5: str, part: Path, progress: Progress) -> None:
    """Download `url` to `part`, resuming if part of it exists, and verify the checksum."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"url must begin with http:// or https://, got {url}")
    part.parent.mkdir(parents=True, exist_ok=True)
    with name_file(part):
        _receive(url, part, progress)
    with part.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != md5:
        part.unlink()
        raise RunError(f"{url} has MD5 {actual}, expected {md5}: removed; run the command again")


def _receive(url: str, part: Path, progress: Progress) -> None:
    done = part.stat().st_size if part.exists() else 0
    problem = None
    try:
        request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response, part.open("ab") as file:
            if done and response.status != 206:  # the server ignores the range and sends all of it
                file.truncate(0)
                done = 0
            total = done + int(response.headers["Content-Length"] or 0)
            while block := response.read(MIB):
                file.write(block)
                done += len(block)
                progress(done, max(total, done))
        if done < total:
            problem = f"ended after {done:,} of {total:,} bytes"
    except HTTPError as error:
        if error.code == 416:  # nothing left to send: the checksum decides whether it is complete
            return
        raise RunError(f"{url} answers {error.code} {error.reason}") from error
    except (HTTPException, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        problem = f"cannot be downloaded: {getattr(error, 'reason', None) or error}"
    if problem is not None:
        raise RunError(
            f"{url} {problem}; run the command again to resume from the {done / MIB:.1f} MiB in "
            f"{part}"
        )


def extract(archive: Path, folder: Path, progress: Progress) -> None:
    """Extract the folder of the same name from a tar archive, completely or not at all.

    Python's filter refuses links, devices and paths that lead outside the folder.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # left behind by a killed process
    try:
        with name_file(folder), tarfile.open(archive) as tar:
            total = archive.stat().st_size
            for member in tar:
                if not Path(member.name).name.startswith("._"):  # what macOS adds to archives
                    tar.extract(member, draft, filter="data")
                progress(min(tar.offset, total), total)
        if not (draft / folder.name / "dataset.json").is_file():
            raise RunError(f"{archive} does not contain {folder.name}/dataset.json")
        (draft / folder.name).rename(folder)
    except tarfile.TarError as error:
        raise RunError(f"{archive} cannot be extracted: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
