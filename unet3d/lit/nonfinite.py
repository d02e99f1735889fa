"""Steps whose loss or gradients are NaN or infinite: left out, counted, traced to a layer."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unet3d.errors import RunError, UsageError
from unet3d.lit.distributed import any_rank
from unet3d.types import HasRetentionPolicy


class NonFiniteGuard:
    """Leaves out steps that would break the weights: `most` in a run, and one more is a Fault.

    The host looks at figures of the device once per batch, when it has the loss. A fused optimizer
    hears of bad gradients on the device, changes nothing, and the host sees them with the next
    batch's loss: no step waits for it.
    """

    def __init__(self, most: int = 0):
        if not isinstance(most, int) or most < 0:
            raise UsageError(f"max_skipped_steps must be an int >= 0, got {most}")
        self.most = most
        self.skipped = 0
        self.loss = math.nan  # of the last batch
        self.leaving = False  # the optimizer step that is under way, with all of its batches
        self.cases: list[str] = []  # of that step
        self.statistics: list[Tensor] = []  # running ones of norms, as they were before the batch
        self.norms: Tensor | None = None  # of the last step's gradients, until they are looked at
        self.names: list[str] = []  # of the parameters that have these gradients
        self.place = ""  # step and cases of these gradients

    def begin(self, model: nn.Module) -> None:
        """Remember running statistics: a forward that gives NaN would spoil them for ever."""
        now = get_running_stats(model)
        if len(self.statistics) != len(now):
            self.statistics = [buffer.clone() for buffer in now]
        elif now:
            torch._foreach_copy_(self.statistics, now)

    def check_loss(
        self, task: pl.LightningModule, model: nn.Module, batch: Any, outputs: Any, loss: Tensor
    ) -> None:
        """Look at the loss of a batch, and at gradients that nobody has looked at."""
        figures = [loss.detach().float().mean()]
        if self.norms is not None:
            figures.append(self.norms.isfinite().all().float())
        self.loss, *before = torch.stack(figures).tolist()
        good = math.isfinite(self.loss)
        if not all(before):
            self._leave_out(task, self._gradients)
        self.norms = None
        self.cases += batch["case"]
        if not any_rank(task.trainer, not good):  # all ranks step, or none
            return
        for buffer, value in zip(get_running_stats(model), self.statistics, strict=True):
            buffer.copy_(value)
        if self.leaving:
            return  # another batch of this step was bad as well
        self.leaving = True
        step = f"step {task.global_step}"
        if good:
            self._leave_out(task, lambda: f"the loss of another rank is not finite at {step}")
            return

        def told() -> str:
            cases = ", ".join(dict.fromkeys(batch["case"]))
            why = locate_nonfinite(model, batch["image"], outputs)
            return f"the loss is {loss.item()} at {step}, cases {cases}: {why}"

        self._leave_out(task, told)

    def check_gradients(
        self, task: pl.LightningModule, model: nn.Module, optimizer: Optimizer
    ) -> Tensor | None:
        """The norm of all gradients; if it is not finite, the optimizer will change nothing.

        None if a scaler looks after them: in float16 some that are not finite are to be expected.
        """
        if getattr(task.trainer.precision_plugin, "scaler", None) is not None:
            return None
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if not found:
            return None
        norms = torch.stack(torch._foreach_norm(list(found.values()), 2, torch.float32))
        total = torch.linalg.vector_norm(norms)
        self.norms, self.names = norms, list(found)
        self.place = f"step {task.global_step}, cases {', '.join(dict.fromkeys(self.cases))}"
        # A fused SGD that leaves out its first step has momentum that nobody has set.
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            fused: Any = optimizer
            fused.found_inf = (~total.isfinite()).float()  # as a scaler would tell it
        elif not total.isfinite():
            optimizer.zero_grad()  # without gradients it changes nothing
        return total

    def finish(self, task: pl.LightningModule) -> None:
        """Look at the last gradients of an epoch."""
        if self.norms is not None and not self.norms.isfinite().all():
            self._leave_out(task, self._gradients)
        self.norms = None

    def end_step(self) -> None:
        """The optimizer has stepped, or has been left out."""
        self.leaving, self.cases = False, []

    def _leave_out(self, task: pl.LightningModule, told: Callable[[], str]) -> None:
        """Count the step, and tell why where somebody will read it: to find a layer takes time."""
        self.skipped += 1
        if self.skipped > self.most:
            more = "max_skipped_steps=10 would leave out up to 10 such steps"
            if self.most:
                more = f"max_skipped_steps={self.most} were left out before"
            raise RunError(f"{told()}; {more}")
        task.log("train/skipped_steps", float(self.skipped))
        if self.skipped.bit_count() == 1:  # 1, 2, 4, 8, ...
            task.print(f"{told()}; this step is left out ({self.skipped} of at most {self.most})")

    def _gradients(self) -> str:
        assert self.norms is not None
        bad = [
            n for n, ok in zip(self.names, self.norms.isfinite().tolist(), strict=True) if not ok
        ]
        more = f" and of {len(bad) - 1} before it" if len(bad) > 1 else ""
        return (
            f"the loss is finite but its gradient is not at {self.place}: that of {bad[-1]}{more}"
        )


def get_running_stats(model: nn.Module) -> list[Tensor]:
    """What a forward in training changes, counters aside."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def locate_nonfinite(model: nn.Module, image: Tensor, outputs: Any) -> str:
    """Where the first value arose that is not finite."""
    if all_finite(outputs):
        return "the network's output is finite, the loss itself is not"
    if not all_finite(image):
        return "the image itself is not finite"
    try:
        name = find_first_nonfinite_module(model, image)
    except torch.OutOfMemoryError:
        return "to find the layer takes more memory than there is"
    if name is None:
        return "run again as plain modules, the network's output is finite"
    weights = model.get_submodule(name).parameters(recurse=False)
    broken = "" if all_finite(list(weights)) else ", whose weights are not finite"
    return f"the first value that is not finite came out of {name or 'the network'}{broken}"


@torch.no_grad()
def find_first_nonfinite_module(model: nn.Module, image: Tensor) -> str | None:
    """The first module whose output is not finite; the model stays as it was."""
    found: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, output, name=name: (
                None if all_finite(output) else found.append(name)
            )
        )
        for name, module in model.named_modules()
    ]
    devices = [image.device] if image.device.type == "cuda" else []
    try:
        with as_plain(model), torch.random.fork_rng(devices):
            if not all_finite(model.forward(image)):
                found.append("")
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


@contextmanager
def as_plain(model: nn.Module) -> Generator[None]:
    """Plain modules instead of lean blocks, whose parts no hook would see; buffers are put back."""
    before = [buffer.clone() for buffer in model.buffers()]
    keep = model.keep if isinstance(model, HasRetentionPolicy) else None
    try:
        if isinstance(model, HasRetentionPolicy):
            model.keep = None
        yield
    finally:
        if isinstance(model, HasRetentionPolicy):
            model.keep = keep
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def all_finite(values: Any) -> bool:
    """Whether all numbers of all tensors are."""
    return all(bool(x.isfinite().all()) for x in tree_leaves(values) if isinstance(x, Tensor))
