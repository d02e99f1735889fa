"""A training step as Lightning runs it, for the meter: the same objects, no trainer, no data."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import build_network, instantiate, make_optimizer_factory
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.machine.device import Precision
from unet3d.model.half_precision import cast_to_half

HALF = {"16": torch.float16, "bf16": torch.bfloat16}
PURE = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class PhaseListener(Protocol):
    """Who is told what a step is doing: a meter's Trace, or nobody."""

    def begin_phase(self, phase: str) -> None:
        """A phase begins."""
        ...

    def label(self, tensors: Any, kind: str) -> None:
        """These tensors are of that kind."""
        ...


class TracingListener(PhaseListener, Protocol):
    """Who also knows what the step has taken so far."""

    def live_bytes(self) -> int:
        """Bytes of all tensors that are alive."""
        ...


class PeakWindowsOnly:
    """A network that runs on windows that find more taken than any before them found.

    What a window takes of its own is always the same: no other one comes near the peak, and a
    volume has hundreds of them.
    """

    def __init__(self, model: nn.Module, trace: TracingListener):
        self.model, self.trace = model, trace
        self.most: dict[torch.Size, int] = {}
        self.logits: dict[torch.Size, tuple[torch.Size, torch.dtype]] = {}

    def __call__(self, windows: Tensor) -> Tensor:
        taken, kind = self.trace.live_bytes(), windows.shape
        if taken <= self.most.get(kind, -1):
            shape, dtype = self.logits[kind]
            return windows.new_empty(shape, dtype=dtype)
        logits = self.model(windows)
        self.most[kind], self.logits[kind] = taken, (logits.shape, logits.dtype)
        return logits


class TrainingStep:
    """Forward, backward, clipping, optimizer, zero_grad: in the order of lit/task.py."""

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        infer: SlidingWindow,
        patch: Sequence[int],
        volume: Sequence[int],
        batch_size: int,
        channels: int,
        micro_batches: int,
        clip: float | None,
        autocast: torch.dtype | None,
        dtype: torch.dtype,
        device: str = "cpu",
    ):
        self.model, self.loss, self.optimizer, self.infer = model, loss, optimizer, infer
        self.patch, self.volume = list(patch), list(volume)
        self.batch_size, self.channels = batch_size, channels
        self.micro_batches, self.clip = micro_batches, clip
        self.autocast, self.dtype, self.device = autocast, dtype, device

    def train(self, trace: PhaseListener) -> None:
        """One optimizer step."""
        for _ in range(self.micro_batches):
            trace.begin_phase("forward")
            batch = self._batch(trace, self.batch_size, self.patch)
            with self._autocast():
                loss = self._loss(*batch)
            trace.begin_phase("backward")
            (loss / self.micro_batches).backward()
            del loss
        trace.begin_phase("optimizer")
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            trace.label(list(state.values()), "optimizer state")

    def validate(self, trace: TracingListener) -> None:
        """One validation case, window by window, as far as it has a part in the peak."""
        trace.begin_phase("validation")
        image, _ = self._batch(trace, 1, self.volume)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            self.infer(image, PeakWindowsOnly(self.model, trace))
        self.model.train()

    def _loss(self, image: Tensor, label: Tensor) -> Tensor:
        return self.loss(self.model(image), label)

    def _batch(self, trace: PhaseListener, size: int, space: list[int]) -> tuple[Tensor, Tensor]:
        image = torch.zeros(size, self.channels, *space, dtype=self.dtype, device=self.device)
        if self.device != "cpu":
            image.normal_()  # a GPU multiplies zeros faster than numbers
        label = torch.zeros(size, *space, dtype=torch.uint8, device=self.device)
        trace.label([image, label], "input")
        return image, label

    def _autocast(self) -> AbstractContextManager:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.autocast)


def make_step_factory(
    request: ComposedConfig,
    used: Precision,
    *,
    cuda: bool,
    volume: Sequence[int] | None = None,
    device: str = "cpu",
) -> Callable[[], TrainingStep]:
    """A function that makes the configured step, to be called under FakeTensorMode; or a real one.

    `cuda` says whose habits the step has, `device` where its tensors lie.
    """
    cfg = request.config

    def make_step() -> TrainingStep:
        model = build_network(request)
        instantiate(cfg.checkpointing).apply(model)
        dtype = PURE.get(used.used, torch.float32)
        if dtype != torch.float32:
            cast_to_half(model, dtype)
        if device != "cpu":
            model.to(device)
        optimizer = make_optimizer_factory(cfg, used)(model.parameters())
        for group in optimizer.param_groups:
            if cuda and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # torch's own choice on CUDA
        return TrainingStep(
            model=model,
            loss=instantiate(cfg.loss).to(device),
            optimizer=optimizer,
            infer=SlidingWindow(list(cfg.data.patch_size), **cfg.inference),
            patch=cfg.data.patch_size,
            volume=volume or cfg.data.patch_size,
            batch_size=cfg.data.batch_size,
            channels=cfg.data.in_channels,
            micro_batches=cfg.trainer.accumulate_grad_batches,
            clip=cfg.trainer.gradient_clip_val,
            autocast=HALF.get(used.used),
            dtype=dtype,
            device=device,
        )

    return make_step
