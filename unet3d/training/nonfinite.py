"""Guard training against NaN and infinite values: skip the step, count it, find the layer."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unet3d.errors import RunError
from unet3d.lazy_logits import LazyLogits
from unet3d.training.distributed import RankAgreement
from unet3d.training.loggers import log_values
from unet3d.types import HasRetention

if TYPE_CHECKING:
    from unet3d.training.module import SegmentationModule

MAX_OVERFLOWS = 20
"""Steps in a row whose scaled gradients may overflow: by then a scale of 65,536 is below 1."""


class NonFiniteGuard:
    """Skip steps with a non-finite loss or gradient; raise RunError after `max_skipped` of them.

    The host reads values from the device once per batch, together with the loss. Non-finite
    gradients are reported to a fused optimizer on the device, which then changes nothing; the host
    reads that with the next batch's loss, so no step waits for it.
    """

    def __init__(self, model: nn.Module, ranks: RankAgreement, max_skipped: int):
        self.model, self.ranks, self.max_skipped = model, ranks, max_skipped
        self.skipped = 0
        self.loss = math.nan  # of the last batch
        self.losses: list[float] = []  # of the batches of the current optimizer step
        self.step_loss = math.nan  # their mean
        self.skipping = False  # whether the current optimizer step is skipped, with all its batches
        self.cases: list[str] = []  # of the current optimizer step
        self.saved_stats: list[Tensor] = []  # running statistics of norms before the batch
        self.is_scaled = False  # by a gradient scaler, which expects some overflows
        self.overflows = 0  # of steps in a row
        self.norms: Tensor | None = None  # of the last step's gradients, until the host reads them
        self.names: list[str] = []  # of the parameters with these gradients
        self.place = ""  # step and cases of these gradients

    def begin(self) -> None:
        """Save the running statistics, which a forward with NaN would spoil for good."""
        stats = get_running_stats(self.model)
        if len(self.saved_stats) != len(stats):
            self.saved_stats = [buffer.clone() for buffer in stats]
        elif stats:
            torch._foreach_copy_(self.saved_stats, stats)

    def check_loss(
        self, task: "SegmentationModule", batch: Any, outputs: Any, loss: Tensor
    ) -> None:
        """Check the loss of a batch, and the gradients of the step before it.

        What ranks agree on is read with it: there is one collective and one wait in a step.
        """
        value = loss.detach().float().mean()
        norms = [] if self.norms is None else [self.norms.isfinite().all().float()]
        values = [value, *norms, *self.ranks.exchange(~value.isfinite())]
        self.loss, *others = torch.stack(values).tolist()
        self.losses.append(self.loss)
        self.step_loss = sum(self.losses) / len(self.losses)
        loss_finite = math.isfinite(self.loss)
        if norms:
            self._judge_gradients(task, finite=bool(others.pop(0)))
        self.cases += batch["case"]
        spoiled = self.ranks.accept(others) if others else not loss_finite
        if not spoiled:  # all ranks step, or none
            return
        for buffer, value in zip(get_running_stats(self.model), self.saved_stats, strict=True):
            buffer.copy_(value)
        if self.skipping:
            return  # an earlier batch of this step was non-finite, too
        self.skipping = True

        def describe() -> str:
            if loss_finite:
                return f"the loss of another rank is not finite at step {task.global_step}"
            cases = ", ".join(dict.fromkeys(batch["case"]))
            origin = locate_nonfinite(self.model, batch["image"], outputs)
            return f"the loss is {self.loss} at step {task.global_step}, cases {cases}: {origin}"

        self._skip(task, describe)

    def check_gradients(self, task: LightningModule, optimizer: Optimizer) -> Tensor | None:
        """Return the norm of all gradients; unless it is finite, the optimizer changes nothing.

        A gradient scaler skips such a step itself; in float16 some overflows are expected.
        """
        scaler = getattr(task.trainer.precision_plugin, "scaler", None)
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.is_scaled = scaler is not None
        if scaler is not None and is_fused:  # Lightning has unscaled the gradients of any other
            scaler.unscale_(optimizer)
        parameters = self.model.named_parameters()
        gradients = {name: p.grad for name, p in parameters if p.grad is not None}
        if not gradients:
            return None
        norms = torch.stack(torch._foreach_norm(list(gradients.values()), 2, torch.float32))
        total = torch.linalg.vector_norm(norms)
        self.norms, self.names = norms, list(gradients)
        self.place = f"step {task.global_step}, cases {', '.join(dict.fromkeys(self.cases))}"
        # Not on the first step: a fused SGD that skips it has uninitialized momentum.
        if is_fused and optimizer.state:
            fused: Any = optimizer
            if scaler is None:
                fused.found_inf = (~total.isfinite()).float()  # as a gradient scaler sets it
        elif (scaler is None or is_fused) and not total.isfinite():
            optimizer.zero_grad()  # without gradients the optimizer changes nothing
        return total

    def finish(self, task: LightningModule) -> None:
        """Check the last gradients of an epoch."""
        if self.norms is not None:
            self._judge_gradients(task, finite=bool(self.norms.isfinite().all()))

    def _judge_gradients(self, task: LightningModule, *, finite: bool) -> None:
        """Count a step whose gradients are not finite, unless a lower scale may still help."""
        self.overflows = 0 if finite else self.overflows + 1
        if not finite and (not self.is_scaled or self.overflows > MAX_OVERFLOWS):
            self._skip(task, self._describe_gradients)
        self.norms = None

    def end_step(self) -> None:
        """Reset after an optimizer step, whether it was taken or skipped."""
        self.skipping, self.cases, self.losses = False, [], []

    def _skip(self, task: LightningModule, describe: Callable[[], str]) -> None:
        """Count the step; `describe` is called only if it is printed, as it may take a forward."""
        self.skipped += 1
        if self.skipped > self.max_skipped:
            advice = "lower optimizer.lr, or set max_skipped_steps=10 to skip up to 10 such steps"
            if self.max_skipped:
                advice = (
                    f"this exceeds max_skipped_steps={self.max_skipped}: lower optimizer.lr, or "
                    "check the named cases with unet3d check"
                )
            raise RunError(f"{describe()}; {advice}")
        log_values(task, {"train/skipped_steps": self.skipped})
        if self.skipped.bit_count() == 1:  # 1, 2, 4, 8, ...
            task.print(f"{describe()}; step skipped ({self.skipped} of at most {self.max_skipped})")

    def _describe_gradients(self) -> str:
        assert self.norms is not None
        finite = self.norms.isfinite().tolist()
        bad = [name for name, ok in zip(self.names, finite, strict=True) if not ok]
        scale = f" after {self.overflows} steps in which the scale fell" if self.is_scaled else ""
        others = f" (and {len(bad) - 1} more parameters)" if len(bad) > 1 else ""
        # The last parameter is the first one in backward.
        return f"the gradient is not finite{scale} at {self.place}: first in {bad[-1]}{others}"


def get_running_stats(model: nn.Module) -> list[Tensor]:
    """Return the buffers that a training forward changes, except integer counters."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def locate_nonfinite(model: nn.Module, image: Tensor, outputs: Any) -> str:
    """Describe where the first non-finite value came from; `outputs` may be unknown."""
    if outputs is not None and are_all_finite(outputs):
        return "the network's output is finite, the loss itself is not"
    if not are_all_finite(image):
        return "the image itself is not finite"
    try:
        name = find_first_nonfinite_module(model, image)
    except torch.OutOfMemoryError:
        return "not enough memory to find the layer"
    if name is None:
        return "recomputed with plain modules, the network's output is finite"
    weights = model.get_submodule(name).parameters(recurse=False)
    cause = "" if are_all_finite(list(weights)) else ", whose weights are not finite"
    return f"the first non-finite value came out of {name or 'the network'}{cause}"


@torch.no_grad()
def find_first_nonfinite_module(model: nn.Module, image: Tensor) -> str | None:
    """Return the first module with a non-finite output, found in a copy of the model."""
    names: list[str] = []
    copy = deepcopy(model)
    if isinstance(copy, HasRetention):
        copy.retention = None  # plain modules, which call hooks
    for name, module in copy.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: (
                None if are_all_finite(output) else names.append(name)
            )
        )
    with torch.random.fork_rng([image.device] if image.device.type == "cuda" else []):
        copy(image)
    return names[0] if names else None


def are_all_finite(values: Any) -> bool:
    """Return whether all values of all tensors are finite."""
    parts = tree_leaves(values, is_leaf=lambda value: isinstance(value, LazyLogits))
    return all(x.are_finite() for x in parts if isinstance(x, LazyLogits)) and all(
        bool(x.isfinite().all()) for x in parts if isinstance(x, Tensor)
    )
