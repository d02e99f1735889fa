"""Start training runs, wait for a moment to interrupt them, and compare their results.

Most runs are forked from a process that has imported everything, so that a start takes a second;
others are commands of their own, as users start them.
"""

import atexit
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any, Protocol

from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import unet3d.cli.launch as launch
from scripts.compare_checkpoints import is_equal
from unet3d.checkpoint_file import load_checkpoint
from unet3d.cli.main import import_command
from unet3d.cli.main import main as run_command
from unet3d.errors import STOP_SIGNALS
from unet3d.lit.callbacks.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint
from unet3d.lit.callbacks.preemption import Preemption
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.machine.distributed_env import LAUNCHER

import_command("train")  # once, before all forks

STOP_TIMEOUT_SECONDS, TRAINING_TIMEOUT_SECONDS = 60, 300
"""A run that takes longer to stop, or to finish training, counts as hanging."""

SMALL_JOB = [
    *("data.layout.size=[16,16,16]", "data.layout.num_cases=8", "data.patch_size=[16,16,16]"),
    *("data.batch_size=2", "data.patches_per_case=1", "trainer.enable_progress_bar=false"),
    *("trainer.accelerator=cpu", "memory.estimate=false", "evaluation.enabled=false"),
]
"""Three steps per epoch with one rank."""

FAULT_TOLERANCE_CALLBACKS: tuple[type[Callback], ...] = (
    *(ResumeState, StoppingLimits, Preemption, LastCheckpoint),
)

PHASES = ("start", "training", "validation", "checkpoint", "end")
PROGRESS = mmap.mmap(-1, 16)
"""Phase and step of the first rank of the forked run, in memory shared with this process."""


def set_progress(phase: str | None = None, steps: int | None = None) -> None:
    old_phase, old_steps = struct.unpack_from("qq", PROGRESS)
    new_phase = old_phase if phase is None else PHASES.index(phase)
    struct.pack_into("qq", PROGRESS, 0, new_phase, old_steps if steps is None else steps)


def get_progress() -> tuple[str, int]:
    phase, steps = struct.unpack_from("qq", PROGRESS)
    return PHASES[phase], steps


def instrument() -> None:
    """Patch training so that forked runs report their progress and fork their ranks."""

    def call_before(owner: type, hook: str, report: Callable[[Any], None]) -> None:
        original = getattr(owner, hook)

        @wraps(original)
        def wrapped(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.is_global_zero and not trainer.sanity_checking:
                report(trainer)
            return original(self, trainer, *args, **kwargs)

        setattr(owner, hook, wrapped)

    call_before(ResumeState, "on_train_start", lambda t: set_progress("training", t.global_step))
    call_before(
        ResumeState, "on_train_batch_end", lambda t: set_progress("training", t.global_step)
    )
    call_before(ResumeState, "on_validation_end", lambda t: set_progress("training"))
    call_before(Preemption, "on_validation_start", lambda t: set_progress("validation"))
    call_before(Preemption, "on_fit_end", lambda t: set_progress("end"))
    save = AtomicCheckpointIO.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        phase, _ = get_progress()
        set_progress("checkpoint")
        save(*args, **kwargs)
        set_progress(phase)

    AtomicCheckpointIO.save_checkpoint = save_checkpoint
    vars(launch)[launch.start_ranks.__name__] = fork_ranks


class Process(Protocol):
    """What subprocess.Popen and ForkedProcess have in common."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def wait(self) -> int: ...


class ForkedProcess:
    """A forked child with the methods of subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_train(words: Sequence[str], environ: dict[str, str], log: Path | None) -> ForkedProcess:
    """Run `unet3d train` in a child with its own session; it runs atexit functions at its end."""
    child = os.fork()
    if child:
        return ForkedProcess(child)
    code = 70
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        if log is not None:
            for number in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environ)
        GlobalHydra.instance().clear()
        code = run_command(["train", *words])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def fork_ranks(words: Sequence[str], folder: Path, count: int) -> list[ForkedProcess]:
    """Replace launch.start_ranks, to save the seconds that imports take."""
    with launch.socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    common[LAUNCHER] = str(os.getpid())
    words = [*words, f"hydra.run.dir='{folder}'"]
    return [
        fork_train(words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, None)
        for rank in range(count)
    ]


class Job:
    """One start of a run in its folder: a new run, or one that resumes."""

    def __init__(self, words: Sequence[str], folder: Path, *, separate: bool = False):
        self.folder, self.log = folder, folder.with_suffix(".txt")
        self.log.write_text("")
        words = [*words, "resume=auto", f"hydra.run.dir={folder}"]
        set_progress("start", 0)
        self.start, self.separate = time.monotonic(), separate
        self.pids: list[int] = []
        self.process: Process
        if separate:
            with self.log.open("w") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "unet3d.cli.main", "train", *words],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        else:
            self.process = fork_train(words, {}, self.log)

    def list_ranks(self) -> list[int]:
        """Return the process ids of the ranks in order; with one rank, the job's own."""
        children = sorted(list_children(self.process.pid))
        self.pids = sorted({*self.pids, *children})
        return children or [self.process.pid]

    def wait_until(self, moment: float) -> bool:
        """Wait until a moment; return False if the job has ended."""
        while time.monotonic() < moment:
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        return self.process.poll() is None

    def wait_for_phase(self, phases: Sequence[str]) -> bool:
        """Wait until the job is in one of the phases; return False if it has ended."""
        while self.process.poll() is None:
            if get_progress()[0] in phases:
                return True
            if time.monotonic() > self.start + TRAINING_TIMEOUT_SECONDS:
                return True
            time.sleep(0.0005)
        return False

    def wait_random(self, random: Random, *, start: float, spread: float) -> bool:
        """Wait for a random moment; return False if the job has ended before.

        One moment in five is in the first `start` seconds, the others are up to `spread` seconds
        later.
        """
        if self.separate or random.random() < 0.2:
            return self.wait_until(self.start + random.uniform(0, start + self.separate * spread))
        phases = random.choice((PHASES[1:], PHASES[1:], ("validation",), ("checkpoint",)))
        delay = random.uniform(0, spread)
        if not self.wait_for_phase(PHASES[1:]) or not self.wait_until(time.monotonic() + delay):
            return False
        return self.wait_for_phase((*phases, "end")) and self.wait_until(
            time.monotonic() + random.random() / 200
        )

    def wait(self, timeout: float = STOP_TIMEOUT_SECONDS) -> tuple[int | None, float]:
        """Return the exit code as in a shell (None: it hung and was killed) and the seconds."""
        start = time.monotonic()
        self.list_ranks()
        while self.process.poll() is None and time.monotonic() < start + timeout:
            time.sleep(0.002)
        code, seconds = self.process.poll(), time.monotonic() - start
        self.list_ranks()
        for pid in (self.process.pid, *self.pids):
            with suppress(ProcessLookupError):
                if code is None or pid != self.process.pid:
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return (128 - code if code is not None and code < 0 else code), seconds


def list_children(pid: int) -> list[int]:
    """Return the children of a process, without zombies."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(parent) == pid and state != "Z":
                    children.append(int(entry.name))
    return children


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def finish(words: Sequence[str], folder: Path) -> bool:
    """Resume a run and wait for its end; return whether it succeeded."""
    code, _ = Job(words, folder).wait(TRAINING_TIMEOUT_SECONDS)
    return code == 0


def read_results(folder: Path) -> dict[str, Any]:
    """Return a run's checkpoints, without times of day, and its curves."""
    results: dict[str, Any] = {}
    for name in ("last", "best"):
        checkpoint = load_checkpoint(folder / "checkpoints" / f"{name}.ckpt")
        keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
        results[name] = {key: checkpoint[key] for key in keys}
        for callback in (ResumeState, BestCheckpoint):
            key = callback.__qualname__
            results[name][key] = checkpoint["callbacks"][key]
    log = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    log.Reload()
    tags = [tag for tag in log.Tags()["scalars"] if tag.startswith(("train/", "val/"))]
    curves = {tag: [(s.step, s.value) for s in log.Scalars(tag)] for tag in sorted(tags)}
    return results | {"curves": curves}


def find_differences(folder: Path, reference: dict[str, Any]) -> list[str]:
    """Name the results of a finished run that differ from those of the uninterrupted run."""
    results = read_results(folder)
    parts = [
        f"{name} {part}" if name != "curves" else f"curve {part}"
        for name, content in reference.items()
        for part in {**content, **results[name]}
        if not is_equal(content.get(part), results[name].get(part))
    ]
    return parts + [f"leftover draft: {f.name}" for f in (folder / "checkpoints").glob(".*")]


def find_corrupt(checkpoints: Path) -> list[str]:
    """Describe checkpoints that cannot be read, and a missing last.ckpt."""
    errors = []
    for name in ("last.ckpt", "best.ckpt", "previous.ckpt"):
        path = checkpoints / name
        if not path.exists():
            if name == "last.ckpt" and (checkpoints / "previous.ckpt").exists():
                errors.append(f"{name} is missing")
            continue
        try:
            load_checkpoint(path)
        except Exception as error:
            errors.append(str(error))
    return errors


def read_saved_steps(folder: Path) -> int:
    """Return the step of the last checkpoint; 0 without one."""
    path = folder / "checkpoints" / "last.ckpt"
    return load_checkpoint(path)["global_step"] if path.exists() else 0
