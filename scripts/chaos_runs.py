"""Runs for chaos.py: started, watched, hit at a moment of their life, compared with one left alone.

Most are children forked from a process that has imported everything, so that a start takes a
second; others are commands of their own, as a user starts them.
"""

import atexit
import mmap
import os
import shutil
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

import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import unet3d.cli.launch as launch
from unet3d.cli.main import import_command
from unet3d.cli.main import main as command
from unet3d.lit.callbacks.checkpoints import AtomicCheckpointIO, LastCheckpoint
from unet3d.lit.callbacks.preemption import HEARD, Preemption
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.stopping import StoppingLimits
from unet3d.lit.resume import load_checkpoint
from unet3d.machine.distributed_env import LAUNCHER

import_command("train")  # once, before all forks

PATIENCE_SECONDS, TRAINING_SECONDS = 60, 300
"""A run that takes so long to leave, or to train to its end, hangs."""

SMALL = [
    *("data.source.size=[16,16,16]", "data.source.num_cases=8", "data.patch_size=[16,16,16]"),
    *("data.batch_size=2", "data.patches_per_case=1", "trainer.enable_progress_bar=false"),
    *("trainer.accelerator=cpu", "memory.estimate=false", "evaluation.enabled=false"),
]
"""Three steps an epoch with one rank."""

PHASES = ("start", "training", "validation", "checkpoint", "end")
SHOWN = mmap.mmap(-1, 16)
"""Phase and steps of the first rank of the forked run, for the process that watches it."""


def show(phase: str | None = None, steps: int | None = None) -> None:
    old_phase, old_steps = struct.unpack_from("qq", SHOWN)
    new_phase = old_phase if phase is None else PHASES.index(phase)
    struct.pack_into("qq", SHOWN, 0, new_phase, old_steps if steps is None else steps)


def shown() -> tuple[str, int]:
    phase, steps = struct.unpack_from("qq", SHOWN)
    return PHASES[phase], steps


def instrument() -> None:
    """Let forked runs show where they are."""

    def before(owner: type, hook: str, act: Callable[[Any], None]) -> None:
        original = getattr(owner, hook)

        @wraps(original)
        def wrapped(self: Any, trainer: Any, *rest: Any, **named: Any) -> Any:
            if trainer.is_global_zero and not trainer.sanity_checking:
                act(trainer)
            return original(self, trainer, *rest, **named)

        setattr(owner, hook, wrapped)

    before(ResumeState, "on_train_start", lambda t: show("training", t.global_step))
    before(ResumeState, "on_train_batch_end", lambda t: show("training", t.global_step))
    before(ResumeState, "on_validation_end", lambda t: show("training"))
    before(Preemption, "on_validation_start", lambda t: show("validation"))
    before(Preemption, "on_fit_end", lambda t: show("end"))
    save = AtomicCheckpointIO.save_checkpoint

    def saved(*given: Any, **named: Any) -> None:
        phase, _ = shown()
        show("checkpoint")
        save(*given, **named)
        show(phase)

    AtomicCheckpointIO.save_checkpoint = saved
    vars(launch)["started"] = forked_ranks


class Process(Protocol):
    """What is asked of a process, forked or not."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def wait(self) -> int: ...


class Forked:
    """A child of this process, with the words of subprocess.Popen."""

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


def forked(words: Sequence[str], environ: dict[str, str], said: Path | None) -> Forked:
    """`unet3d train` in a child, with a session of its own; as a process, it ends by its atexit."""
    child = os.fork()
    if child:
        return Forked(child)
    code = 70
    try:
        for number in HEARD:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        if said is not None:
            for number in (1, 2):
                os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environ)
        GlobalHydra.instance().clear()
        code = command(["train", *words])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def forked_ranks(words: Sequence[str], folder: Path, count: int) -> list[Forked]:
    """As launch.started, without the seconds that imports take."""
    with launch.socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    common[LAUNCHER] = str(os.getpid())
    words = [*words, f"hydra.run.dir='{folder}'"]
    return [
        forked(words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, None)
        for rank in range(count)
    ]


class Job:
    """One start of a run in its folder."""

    def __init__(self, words: Sequence[str], folder: Path, *, real: bool = False):
        self.folder, self.said = folder, folder.with_suffix(".txt")
        self.said.write_text("")
        words = [*words, "resume=auto", f"hydra.run.dir={folder}"]
        show("start", 0)
        self.begun, self.real = time.monotonic(), real
        self.family: list[int] = []
        self.process: Process
        if real:
            with self.said.open("w") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "unet3d.cli.main", "train", *words],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        else:
            self.process = forked(words, {}, self.said)

    def ranks(self) -> list[int]:
        """The ranks' process ids, in order; of one rank, the job's own."""
        found = sorted(children(self.process.pid))
        self.family = sorted({*self.family, *found})
        return found or [self.process.pid]

    def until(self, moment: float) -> bool:
        """Wait; False if the job has ended before."""
        while time.monotonic() < moment:
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        return self.process.poll() is None

    def into(self, phases: Sequence[str]) -> bool:
        """Wait for the job to be in one of these phases, or beyond its start at all."""
        while self.process.poll() is None:
            if shown()[0] in phases:
                return True
            if time.monotonic() > self.begun + TRAINING_SECONDS:
                return True
            time.sleep(0.0005)
        return False

    def waited(self, random: Random, *, start: float, spread: float) -> bool:
        """Wait for a random moment of its life; False if it has ended before.

        One of five is within its first `start` seconds, the others within `spread` after those.
        """
        if self.real or random.random() < 0.2:
            return self.until(self.begun + random.uniform(0, start + self.real * spread))
        wanted = random.choice((PHASES[1:], PHASES[1:], ("validation",), ("checkpoint",)))
        wait = random.uniform(0, spread)
        if not self.into(PHASES[1:]) or not self.until(time.monotonic() + wait):
            return False
        return self.into((*wanted, "end")) and self.until(time.monotonic() + random.random() / 200)

    def ended(self, patience: float = PATIENCE_SECONDS) -> tuple[int | None, float]:
        """Exit code as a shell has it, None for a hang; and the seconds that it took."""
        begun = time.monotonic()
        self.ranks()
        while self.process.poll() is None and time.monotonic() < begun + patience:
            time.sleep(0.002)
        code, seconds = self.process.poll(), time.monotonic() - begun
        self.ranks()
        for pid in (self.process.pid, *self.family):
            with suppress(ProcessLookupError):
                if code is None or pid != self.process.pid:
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return (128 - code if code is not None and code < 0 else code), seconds


def children(pid: int) -> list[int]:
    """Processes that a process has started and not yet waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after[1]) == pid and after[0] != "Z":
                    found.append(int(entry.name))
    return found


def runs(pid: int) -> bool:
    """Whether a process runs; one that is over and not yet waited for does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def finish(words: Sequence[str], folder: Path) -> bool:
    """Take a run up until it is done; False if it cannot be."""
    code, _ = Job(words, folder).ended(TRAINING_SECONDS)
    return code == 0


def left(folder: Path) -> dict[str, Any]:
    """What a run leaves: its checkpoints without clocks, and its curves."""
    contents: dict[str, Any] = {}
    for name in ("last", "best"):
        content = load_checkpoint(folder / "checkpoints" / f"{name}.ckpt")
        kept = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
        contents[name] = {key: content[key] for key in kept}
        contents[name] |= {k: content["callbacks"][k] for k in ("Position", "BestCheckpoint")}
    log = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    log.Reload()
    tags = [tag for tag in log.Tags()["scalars"] if tag.startswith(("train/", "val/"))]
    curves = {tag: [(s.step, s.value) for s in log.Scalars(tag)] for tag in sorted(tags)}
    return contents | {"curves": curves}


def equal(one: Any, other: Any) -> bool:
    """Nested values alike, tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def unlike(folder: Path, reference: dict[str, Any]) -> list[str]:
    """What of a finished run is not as the uninterrupted one's."""
    found = left(folder)
    parts = [
        f"{name} {part}" if name != "curves" else f"curve {part}"
        for name, content in reference.items()
        for part in {**content, **found[name]}
        if not equal(content.get(part), found[name].get(part))
    ]
    return parts + [f"a draft: {f.name}" for f in (folder / "checkpoints").glob(".*")]


def corrupt(checkpoints: Path) -> list[str]:
    """Checkpoints that are there and not whole, or that should be there."""
    bad = []
    for name in ("last.ckpt", "best.ckpt", "previous.ckpt"):
        path = checkpoints / name
        if not path.exists():
            if name == "last.ckpt" and (checkpoints / "previous.ckpt").exists():
                bad.append(f"{name} is gone")
            continue
        try:
            load_checkpoint(path)
        except Exception as error:
            bad.append(str(error))
    return bad


def steps_in(folder: Path) -> int:
    """Of the last checkpoint; 0 without one."""
    path = folder / "checkpoints" / "last.ckpt"
    return load_checkpoint(path)["global_step"] if path.exists() else 0


def gone(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


HOOKED: tuple[type[Callback], ...] = (ResumeState, StoppingLimits, Preemption, LastCheckpoint)
