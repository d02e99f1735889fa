"""Download, verify and extract tasks of the Medical Segmentation Decathlon.

Downloads resume, which those of torch.hub and MONAI do not; archives are extracted completely or
not at all.
"""

import errno
import hashlib
import tarfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from unet3d.errors import RunError, UsageError
from unet3d.files import add_path_to_errors
from unet3d.text import MIB

TIMEOUT_SECONDS = 30  # time without a byte after which the connection counts as lost
Progress = Callable[[int, int], None]  # called with (done, total)


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
    try:
        with add_path_to_errors(part):
            _receive(url, part, progress)
    except HTTPError as error:
        if error.code != 416:  # nothing left to send: the checksum says whether it is complete
            raise RunError(f"{url} answers {error.code} {error.reason}") from error
    except (HTTPException, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise RunError(
            f"{url} cannot be downloaded: {getattr(error, 'reason', None) or error}; run the "
            f"command again to resume from {part}"
        ) from error
    with part.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != md5:
        part.unlink()
        raise RunError(f"{url} has MD5 {actual}, expected {md5}: removed; run the command again")


def _receive(url: str, part: Path, progress: Progress) -> None:
    done = part.stat().st_size if part.exists() else 0
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
        raise HTTPException(f"it ended after {done:,} of {total:,} bytes")


def extract(archive: Path, folder: Path, progress: Progress) -> None:
    """Extract the folder of the same name from a tar archive, completely or not at all."""
    total = archive.stat().st_size
    try:
        with (
            add_path_to_errors(folder),
            TemporaryDirectory(dir=folder.parent, prefix=".") as draft,
            tarfile.open(archive) as tar,
        ):
            for member in tar:
                if not Path(member.name).name.startswith("._"):  # what macOS adds to archives
                    tar.extract(member, draft, filter="data")  # nothing outside of the draft
                progress(min(tar.offset, total), total)
            extracted = Path(draft, folder.name)
            if not (extracted / "dataset.json").is_file():
                raise RunError(f"{archive} does not contain {folder.name}/dataset.json")
            extracted.rename(folder)
    except tarfile.TarError as error:
        raise RunError(f"{archive} cannot be extracted: {error}") from error
