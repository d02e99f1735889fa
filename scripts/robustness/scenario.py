"""What scenarios of scripts.robustness.environments are made of: commands, and how they ended."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.compare_checkpoints import is_equal
from unet3d.checkpoint_file import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 120

DATA = [
    *("data.root=set", "data.cache=cache", "data.layout.size=[12,12,12]"),
    *("data.layout.num_cases=5", "data.patch_size=[8,8,8]", "data.batch_size=2"),
    *("data.patches_per_case=1", "trainer.accelerator=cpu", "model.width=2", "model.depth=2"),
]
TRAIN = [
    *("train", *DATA, "trainer.enable_progress_bar=false", "resume=auto", "save_every_seconds=0"),
    *("validation.hd95=false", "evaluation.draw_worst=1", "trainer.max_steps=6"),
]
TRAIN_HERE = [*TRAIN, "hydra.run.dir=run"]
SHORT = ["memory.estimate=false", "evaluation.enabled=false"]
COMMANDS = {
    "train": TRAIN_HERE,
    "predict": ["predict", "checkpoint=run.ckpt", "input=scans", "output=out", "device=cpu"],
    "evaluate": ["evaluate", "predictions=labels", "references=labels", "output=scores",
                 "images=scans"],
    "check": ["check", *DATA, "format=json", "output=check.json"],
    "plan": ["plan", *DATA, "measure_time=false", "budget_gib=1", "overwrite=true"],
    "export": ["export", "checkpoint=run.ckpt", "format=torch_export", "output=net.pt2",
               "input=scans"],
    "compare": ["compare", "run", "output=table.txt", "figure=figure.png"],
}  # fmt: skip

OWN_FILES = {"log.txt", ".cache", ".hydra"}
INPUTS = ("set", "cache", "scans", "labels", "run.ckpt")


class Failure(Exception):
    """What a command did that it must not do."""


class NotTried(Exception):
    """Why a scenario cannot be tried on this machine."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        return ["", *self.output.strip().splitlines()][-1]


class Started:
    """A command that runs, with its output in a file."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process, self.log = process, log
        self.pid = process.pid

    def read(self) -> str:
        return self.log.read_text("utf-8", errors="backslashreplace")

    def wait_for(self, text: str) -> None:
        """Wait until the command has printed a text, or has ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while text not in self.read() and self.process.poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit: float = LIMIT_SECONDS) -> Ended:
        """Return how the command ended; one that hangs is killed."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()
            raise Failure(f"hung for {limit:.0f} s: {self.read()[-300:]}") from None
        return Ended(code, self.read())


class Folder:
    """A folder with what commands need, in which a scenario starts them."""

    def __init__(self, path: Path, original: Path):
        self.path, self.original = path, original
        self.processes: list[Started] = []

    def add(self, *names: str) -> None:
        """Copy inputs, or the finished run, into the folder."""
        for name in names:
            source = self.original / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, self.path / name)

    def start(
        self,
        words: Sequence[str],
        environment: dict[str, str | None] | None = None,
        *,
        before: Callable[[], None] | None = None,
        prefix: Sequence[str] = (),
        working_folder: Path | None = None,
    ) -> Started:
        """Start a command; a variable that is None is unset, `before` runs in its process."""
        values = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self.original / ".cache"),
            **(environment or {}),
        }
        log = self.path / f"log{len(self.processes)}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "unet3d.cli.main", *words],
                cwd=working_folder or self.path,
                env={name: value for name, value in values.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=before,
            )
        self.processes.append(Started(process, log))
        return self.processes[-1]

    def run(self, words: Sequence[str], *args: Any, **options: Any) -> Ended:
        return self.start(words, *args, **options).wait()

    def expect(self, ended: Ended, *codes: int, says: str = "") -> None:
        """Judge how a command ended, and what it left."""
        lines = "\n".join(ended.output.strip().splitlines()[-3:])[-500:]
        if "Traceback" in ended.output or "debug=true" in ended.output:
            raise Failure(f"an error that is not handled: {lines}")
        if ended.code not in codes:
            raise Failure(f"exit code {ended.code} instead of {codes}: {lines}")
        if says and not re.search(says, ended.output):
            raise Failure(f"does not say {says!r}: {lines}")
        if ended.code > 1 and not re.search("unet3d: |interrupted", ended.output):
            raise Failure(f"ended without a line that says why: {lines}")
        if leftovers := self.find_leftovers():
            raise Failure(f"left {', '.join(leftovers)}")

    def find_leftovers(self) -> list[str]:
        """Return temporary files and locks."""
        found = []
        for path in self.path.rglob("*"):
            parts = path.relative_to(self.path).parts
            is_draft = path.name.startswith(".") or path.name.endswith((".part", "run.lock"))
            if is_draft and not OWN_FILES & set(parts) and parts[0] not in ("scans", "labels"):
                found.append("/".join(parts))
        return found

    def finish_training(self, words: Sequence[str] = TRAIN_HERE, folder: str = "run") -> None:
        """Resume a training, and compare it with one that was not interrupted."""
        self.expect(self.run(words), 0)
        self.compare_weights(folder, self.original / "run.ckpt")

    def compare_weights(self, folder: str, expected: Path) -> None:
        """Compare the last checkpoint of a run with one that was not disturbed."""
        checkpoint = self.path / folder / "checkpoints" / "last.ckpt"
        if not is_equal(read_weights(checkpoint), read_weights(expected)):
            raise Failure("ended with other weights than an uninterrupted run")

    def end_all(self) -> None:
        """Kill what still runs."""
        for started in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, signal.SIGKILL)
            started.process.wait()


def read_weights(checkpoint: Path) -> Any:
    content = load_checkpoint(checkpoint, mmap=False)
    return content["state_dict"], content["global_step"]


@dataclass(frozen=True)
class Scenario:
    """A sentence that must hold, and a function that raises Failure if it does not."""

    sentence: str
    hold: Callable[[Folder], None]


SCENARIOS: list[Scenario] = []


def scenario(sentence: str) -> Callable[[Callable[[Folder], None]], Callable[[Folder], None]]:
    """Register a function under a sentence."""

    def register(hold: Callable[[Folder], None]) -> Callable[[Folder], None]:
        SCENARIOS.append(Scenario(sentence, hold))
        return hold

    return register
