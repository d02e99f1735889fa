"""Let one process fill a folder of the cache while others wait for it."""

import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from unet3d.files import lock_file


@contextmanager
def lock_cache(
    folder: Path, is_usable: Callable[[Path], bool] = Path.exists
) -> Generator[Path | None]:
    """Yield an empty folder that replaces `folder` on success; None if that is usable already.

    Other threads, ranks and runs that want the same folder wait.
    """
    draft = folder.with_name(f".{folder.name}")
    with lock_file(folder.with_name(f".{folder.name}.lock")):
        if is_usable(folder):
            yield None
            return
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        draft.mkdir()
        try:
            yield draft
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
