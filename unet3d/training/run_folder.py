"""The folder of a run: it belongs to one command at a time, and to one run at all times."""

import os
import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from unet3d.errors import UsageError
from unet3d.files import TRAINING_FILES, lock_file

Log = Callable[[str], None]

LOCK, LOCK_OWNER = "run.lock", ".run.lock.owner"
"""The lock of a folder, and the text that names the process which holds it."""

TRAINING_MARKERS = ("checkpoints/*.ckpt", *TRAINING_FILES)
"""What training has written, and no search."""

RUN_MARKERS = (*TRAINING_MARKERS, "evaluation/evaluation.json")
"""What shows that a folder holds a run."""


@contextmanager
def open_run_folder(folder: Path, *, resume: str | None, log: Log) -> Generator[None]:
    """Create and lock the folder of a run; rename that of an earlier run.

    That gets its name back if the command is refused before it writes.
    """
    checkpoints, path = folder.resolve() / "checkpoints", Path(resume or "/").resolve()
    continues = resume == "auto" or checkpoints in (path, path.parent, path / "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    renamed = None
    if not continues and any(any(folder.glob(pattern)) for pattern in RUN_MARKERS):
        renamed = rename_earlier_run(folder)
        log(f"{folder} held an earlier run, which is in {renamed} now")
    try:
        with lock_folder(folder):
            yield
    except UsageError:
        where = folder.resolve()
        if renamed is not None and not any(where.iterdir()):
            where.rmdir()
            renamed.rename(where)
            log(f"the earlier run is in {folder} again")
        raise


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold the lock of an existing folder; a UsageError names the process that holds it."""
    from filelock import Timeout

    path, owner = folder / LOCK, folder / LOCK_OWNER
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(path, timeout=0))
        except Timeout:
            text = owner.read_text("utf-8") if owner.exists() else "another process"
            raise UsageError(
                f"{folder} is in use by {text}: wait until it has ended, or set another "
                f"output= (if that process is gone, delete {path})"
            ) from None
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = f"process {os.getpid()} on {socket.gethostname()}, since {started}"
        owner.write_text(text, "utf-8")
        try:
            yield
        finally:
            owner.unlink(missing_ok=True)


def rename_earlier_run(folder: Path) -> Path:
    """Rename the folder of an earlier run to NAME.1 or higher, and create it again, empty."""
    where = folder.resolve()  # a link to a folder keeps leading to the latest run
    numbers = (where.with_name(f"{where.name}.{number}") for number in count(1))
    target = next(path for path in numbers if not os.path.lexists(path))
    with lock_folder(folder):
        try:
            where.rename(target)
        except OSError as error:
            raise UsageError(
                f"{folder} holds an earlier run and cannot be renamed ({error.strerror}): continue "
                "that run with resume=auto, or set another output="
            ) from error
    for name in (LOCK, LOCK_OWNER):  # which were moved, too
        (target / name).unlink(missing_ok=True)
    where.mkdir()
    return target
