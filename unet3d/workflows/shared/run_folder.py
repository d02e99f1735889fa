"""The folder of a run: it belongs to one command at a time, and to one run at all times."""

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from itertools import count
from pathlib import Path
from types import MappingProxyType

from unet3d.atomic_write import write_text
from unet3d.checkpoint_file import has_checkpoint
from unet3d.config.compose import Composition
from unet3d.config.settings.evaluation import TRAINING_FILES
from unet3d.errors import UsageError
from unet3d.run_lock import NAME, RunLock, acquire_lock, is_running, parse_record, read_lock

Log = Callable[[str], None]

RUN_FILES = ("checkpoints", *TRAINING_FILES, "validation", "evaluation", ".hydra")
"""What a run leaves in its folder, whatever its settings."""

TRAINING_MARKERS = ("checkpoints/*.ckpt", *TRAINING_FILES)
"""What training has written, and no search."""

RUN_MARKERS = (*TRAINING_MARKERS, ".hydra/config.yaml", "evaluation/evaluation.json")
"""What shows that these files are a run's: other folders have folders of such names, too."""

SWEEP_FILES = ("multirun.yaml",)
"""What a sweep leaves in its folder."""

RESULTS = ("validation", "evaluation")
"""What a run that has a checkpoint leaves; without one, a new run must not read it as its own."""


@dataclass(frozen=True)
class Claim:
    """A locked folder, and the folder that the earlier run has now."""

    lock: RunLock
    aside: Path | None = None

    @contextmanager
    def held(self, log: Log, *, beats: bool = True) -> Generator[Path]:
        """Hold the lock; put the earlier run back if a command is refused before it writes."""
        if beats:
            self.lock.start_heartbeat()
        folder = self.lock.path.parent
        try:
            yield folder
        except UsageError:
            self.lock.release()
            if self.aside is not None:
                with suppress(OSError):  # the folder is not empty
                    where = folder.resolve()
                    where.rmdir()
                    self.aside.rename(where)
                    log(f"the earlier run is in {folder} again")
            raise
        finally:
            self.lock.release()


@contextmanager
def open_run_folder(
    folder: Path,
    *,
    resume: str | None,
    composition: Composition,
    log: Log,
    inputs: Mapping[str, Path | None] = MappingProxyType({}),
    launcher: int | None = None,
    hands_over: bool = False,
) -> Generator[Path]:
    """Hold the lock of a run's folder, which may have another name if that has a time in it.

    A process that starts the ranks of a run hands the lock over to the first of them. `inputs` are
    what the run reads, by key.
    """
    source = None if resume in (None, "auto") else Path(resume)
    claim = claim_folder(
        folder,
        starts_anew=starts_anew(folder, resume),
        files=RUN_FILES,
        has_time=composition.folder_has_time,
        log=log,
        inputs={**inputs, "resume": source},
        launcher=launcher,
    )
    with claim.held(log, beats=not hands_over) as own:
        yield own


@contextmanager
def open_sweep_folder(
    folder: Path,
    *,
    resumes: bool,
    has_time: bool,
    log: Log,
    inputs: Mapping[str, Path | None] = MappingProxyType({}),
) -> Generator[Path]:
    """Hold the lock of the folder of a sweep; its runs have locks of their own."""
    claim = claim_folder(
        folder,
        starts_anew=not resumes,
        files=SWEEP_FILES,
        has_time=has_time,
        log=log,
        inputs=inputs,
    )
    with claim.held(log) as own:
        yield own


def starts_anew(folder: Path, resume: str | None) -> bool:
    """Return whether a run has nothing to do with one that was in its folder before."""
    checkpoints = folder.resolve() / "checkpoints"
    if resume == "auto":
        left = [*checkpoints.glob("*.ckpt"), *(folder / name for name in RESULTS)]
        return not has_checkpoint(checkpoints) and any(path.exists() for path in left)
    if resume is None:
        return True
    path = Path(resume).resolve()
    return path not in (folder.resolve(), checkpoints) and path.parent != checkpoints


def claim_folder(
    folder: Path,
    *,
    starts_anew: bool,
    files: tuple[str, ...],
    has_time: bool,
    log: Log,
    inputs: Mapping[str, Path | None] = MappingProxyType({}),
    launcher: int | None = None,
) -> Claim:
    """Create and lock a folder; what was run in it before is set aside by a run that starts anew.

    Two runs that started in the same second get two folders, TIME and TIME-1.
    """
    original = folder
    for number in count(1):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = acquire_lock(folder, log, launcher=launcher)
        except UsageError:
            if not has_time:
                raise
        else:
            if not starts_anew or not any((folder / name).exists() for name in files):
                return Claim(lock)
            if not has_time:
                return set_aside(folder, lock, log, inputs)
            lock.release()
        folder = original.with_name(f"{original.name}-{number}")
    raise AssertionError


def set_aside(folder: Path, lock: RunLock, log: Log, inputs: Mapping[str, Path | None]) -> Claim:
    """Rename a locked folder with an earlier run to NAME.1 or higher; lock a new one."""
    where = folder.resolve()  # a link to a folder keeps leading to the latest run
    try:
        if not any(any(where.glob(name)) for name in (*RUN_MARKERS, *SWEEP_FILES)):
            raise UsageError(
                f"{folder} is not the folder of a run, but has files of such names: set another "
                "hydra.run.dir="
            )
        for key, path in inputs.items():
            if path is not None and path.resolve().is_relative_to(where):
                raise UsageError(
                    f"{folder} holds an earlier run and {key}={path}, which would be moved with "
                    "it: set another hydra.run.dir="
                )
        reason = find_foreign(where)
        if reason is not None:
            raise UsageError(
                f"{folder} holds an earlier run and {reason}: continue that run with resume=auto, "
                "or set another hydra.run.dir="
            )
        target = rename_to_free_name(where)
    except OSError as error:
        lock.release()
        raise UsageError(
            f"{folder} holds an earlier run and cannot be renamed ({error.strerror}): continue "
            "that run with resume=auto, or set another hydra.run.dir="
        ) from error
    except UsageError:
        lock.release()
        raise
    log(f"{folder} held an earlier run, which is in {target} now")
    RunLock(target, lock.record).release()
    where.mkdir(exist_ok=True)
    return Claim(acquire_lock(folder, log), target)


def rename_to_free_name(folder: Path) -> Path:
    """Rename a folder to the first name that is free, and return it."""
    for number in count(1):
        target = folder.with_name(f"{folder.name}.{number}")
        if os.path.lexists(target):
            continue
        try:
            return folder.rename(target)
        except OSError as error:
            if error.errno not in (EEXIST, ENOTEMPTY):
                raise
    raise AssertionError


def find_foreign(folder: Path) -> str | None:
    """Return what is in a folder that does not belong to its run, and would be moved with it."""
    if Path.cwd().is_relative_to(folder):
        return "is the working folder, or has it in it"
    kept = {"Python": Path(sys.prefix)}
    with suppress(RuntimeError):  # a user without one
        kept["your home folder"] = Path.home()
    for name, path in kept.items():
        if path.resolve().is_relative_to(folder):
            return f"has {name} in it"
    for lock in folder.glob(f"*/{NAME}"):
        if is_running(parse_record(read_lock(lock))) is not False:
            return f"also {lock.parent.name}, in which a command runs"
    return None


def write_records(folder: Path, records: Mapping[str, str]) -> None:
    """Write what Hydra would: the composed config, its own settings, and the overrides."""
    for name, text in records.items():
        (folder / ".hydra").mkdir(exist_ok=True)
        write_text(folder / ".hydra" / name, text)
