"""A user's module: callbacks and a loss that break a run from the outside."""

import multiprocessing
import os
import resource
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class SendSignals(Callback):
    """Send signals to this process at given moments, each once, also over several processes.

    An event is a hook, the number of steps taken, and a signal. `sent` is the file that has a line
    for each that was sent: a resumed run has the same callback and goes on with the next one.
    """

    def __init__(self, events: list[list], sent: str):
        self.events, self.sent = events, Path(sent)

    def on_train_batch_start(self, trainer, *_):
        self.send("train_batch_start", trainer)

    def on_validation_batch_end(self, trainer, *_):
        self.send("validation_batch_end", trainer)

    def send(self, hook, trainer):
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        done = len(self.sent.read_text().splitlines()) if self.sent.exists() else 0
        if done < len(self.events):
            expected_hook, step, name = self.events[done]
            if (hook, trainer.global_step) == (expected_hook, step):
                with self.sent.open("a") as file:
                    file.write(f"{name}\n")
                os.kill(os.getpid(), signal.Signals[name])


class PressTwice(Callback):
    """Press Ctrl-C twice in the first step."""

    def on_train_batch_start(self, *_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the step went on")


class Hang(Callback):
    """Write a file when the first step starts, and go no further."""

    def __init__(self, file: str):
        self.file = Path(file)

    def on_train_batch_start(self, *_):
        self.file.touch()
        time.sleep(100)


class CopyCheckpoints(Callback):
    """Copy last.ckpt in each step, as a kill would leave it, to STEP.ckpt of a folder."""

    def __init__(self, last: str, to: str):
        self.last, self.to = Path(last), Path(to)

    def on_train_batch_start(self, trainer, *_):
        if trainer.is_global_zero and self.last.exists():
            self.to.mkdir(exist_ok=True)
            step = torch.load(self.last, weights_only=True)["global_step"]
            shutil.copy(self.last, self.to / f"{step}.ckpt")


class SpoilImages(Callback):
    """Make the images of a step NaN."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, *_):
        if trainer.global_step == self.step:
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    leaf.fill_(torch.nan)


class SpoilWeight(Callback):
    """Make a value of a weight NaN."""

    def __init__(self, name: str):
        self.name = name

    def on_train_batch_start(self, trainer, pl_module, *_):
        with torch.no_grad():
            pl_module.state_dict()[self.name].view(-1)[0] = torch.nan


class SpoilLoss(Callback):
    """Make the loss of a step NaN; needs `Loss`."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        Loss.factor = torch.nan if trainer.global_step == self.step else 1.0


class Loss(nn.Module):
    """The squared distance of probabilities and labels."""

    factor = 1.0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.factor * (logits.softmax(1) - labels).square().mean()


class FillDisk(Callback):
    """Let no file become larger than 100 kB in some steps, as if the disk were full."""

    def __init__(self, first: int, free: int):
        self.first, self.free = first, free

    def on_train_batch_start(self, trainer, *_):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        is_full = self.first <= trainer.global_step < self.free
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if is_full else hard, hard))


class KillWorkers(Callback):
    """Kill the processes that load data."""

    def on_train_batch_start(self, *_):
        for process in multiprocessing.active_children():
            with suppress(ProcessLookupError):  # dead since the step before, and not noticed yet
                os.kill(process.pid, signal.SIGKILL)
