"""The folder of a run: it belongs to one command at a time, and to one run at all times."""

import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from unet3d.config.compose import Composition
from unet3d.errors import UsageError
from unet3d.files import TRAINING_FILES, lock_file, write_text

Log = Callable[[str], None]

LOCK, LOCK_OWNER = "run.lock", ".run.lock.owner"
"""The lock of a folder, and the text that names the process which holds it."""

TRAINING_MARKERS = ("checkpoints/*.ckpt", *TRAINING_FILES)
"""What training has written, and no search."""

RUN_MARKERS = (*TRAINING_MARKERS, ".hydra/config.yaml", "evaluation/evaluation.json")
"""What shows that a folder holds a run."""

SWEEP_MARKERS = ("multirun.yaml",)
"""What shows that a folder holds a sweep."""


def open_run_folder(
    folder: Path, *, resume: str | None, composition: Composition, log: Log
) -> AbstractContextManager[Path]:
    """Hold the lock of a run's folder, which may have another name if that has a time in it."""
    checkpoints, path = folder.resolve() / "checkpoints", Path(resume or "/").resolve()
    continues = resume == "auto" or checkpoints in (path, path.parent, path / "checkpoints")
    markers = () if continues else RUN_MARKERS
    return create_locked_folder(
        folder, markers=markers, has_time=composition.folder_has_time, log=log
    )


@contextmanager
def create_locked_folder(
    folder: Path, *, markers: Sequence[str], has_time: bool, log: Log
) -> Generator[Path]:
    """Create and lock a folder; rename that of an earlier run, which `markers` show.

    If the command is refused before it writes, the earlier run gets its folder back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    renamed = None
    with ExitStack() as stack:
        if has_time:
            folder = lock_unused_folder(folder, markers, stack)
        else:
            if has_any(folder, markers):
                renamed = rename_earlier_run(folder)
                log(f"{folder} held an earlier run, which is in {renamed} now")
            stack.enter_context(lock_folder(folder))
        try:
            yield folder
        except UsageError:
            stack.close()
            if renamed is not None and not any(folder.iterdir()):
                where = folder.resolve()
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
                f"hydra.run.dir= (if that process is gone, delete {path})"
            ) from None
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = f"process {os.getpid()} on {socket.gethostname()}, since {started}"
        owner.write_text(text, "utf-8")
        try:
            yield
        finally:
            owner.unlink(missing_ok=True)


def has_any(folder: Path, patterns: Sequence[str]) -> bool:
    """Return whether a folder has a file of one of these patterns."""
    return any(any(folder.glob(pattern)) for pattern in patterns)


def lock_unused_folder(folder: Path, markers: Sequence[str], stack: ExitStack) -> Path:
    """Lock the first of NAME, NAME-1, ... that no run has: two may start in the same second."""
    for number in count():
        path = folder.with_name(f"{folder.name}-{number}") if number else folder
        path.mkdir(exist_ok=True)
        if not has_any(path, markers):
            with suppress(UsageError):
                stack.enter_context(lock_folder(path))
                return path
    raise AssertionError


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
                "that run with resume=auto, or set another hydra.run.dir="
            ) from error
    for name in (LOCK, LOCK_OWNER):  # which were moved, too
        (target / name).unlink(missing_ok=True)
    where.mkdir()
    return target


def write_records(folder: Path, records: Mapping[str, str]) -> None:
    """Write what Hydra would: the composed config, its own settings, and the overrides."""
    for name, text in records.items():
        (folder / ".hydra").mkdir(exist_ok=True)
        write_text(folder / ".hydra" / name, text)
