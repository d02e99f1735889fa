"""Seconds per step, volumes per second and the share that waits for data, beside the metrics."""

import os
import time
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from unet3d import nvml

WINDOW = 50
"""So many steps are looked at together before waiting is complained about."""

WORTH = {"cuda": 0.02, "cpu": 0.1}
"""The share of a step from which waiting is worth a line. A CPU that makes its data itself, between
steps, waits for all of it."""

REMEDIES = {
    "reading": "data.cache on a faster disk",
    "augmenting": "augmentation=light or none",
}
"""What makes a part of making a batch cheaper."""


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds of one optimizer step."""

    whole: float
    waiting: float  # for data, within the whole
    making: dict[str, float]  # of its batches, by part, by however many workers beside it


class StepSpeed(Callback):
    """Times each optimizer step from the end of the one before it, so waiting for data counts."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self.begun = 0.0
        self.volumes = 0
        self.batches: list[Any] = []  # waits and parts of this step's micro-batches
        self.stepping = False  # whether this batch ends with an optimizer step
        self.seconds, self.shares = array("d"), array("d")  # of every step
        self.recent: deque[StepTiming] = deque(maxlen=WINDOW)
        self.use: int | None = None  # of the GPU in percent
        self.asked = 0.0  # when the driver was
        self.said: set[str] = set()

    def on_train_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.volumes += len(batch["image"])
        self.batches.append((batch["wait"], batch["seconds"]))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.stepping = True

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self.stepping:
            return
        now = time.perf_counter()
        step = StepTiming(
            whole=now - self.begun,
            # The loss of this step has been looked at, so a GPU is past its batch: no new stop.
            waiting=sum(wait.seconds() for wait, _ in self.batches),
            making=sum_parts([parts for _, parts in self.batches]),
        )
        share = step.waiting / step.whole
        self.seconds.append(step.whole)
        self.shares.append(share)
        self.recent.append(step)
        pl_module.log_dict(
            {
                "speed/step_seconds": step.whole,
                "speed/volumes_per_second": self.volumes / step.whole,
                "speed/data_wait_share": share,
                **self._gpu_use(pl_module.device, now),
            }
        )
        self.begun, self.volumes, self.batches, self.stepping = now, 0, [], False
        if len(self.seconds) % WINDOW == 1 and len(self.seconds) > WINDOW:  # the first one warms up
            self._complain(pl_module)

    def _gpu_use(self, device: torch.device, now: float) -> dict[str, float]:
        """As the driver saw it in its last sample; it makes a few of them a second."""
        if device.type == "cuda" and now - self.asked >= 1:
            self.use, self.asked = nvml.get_utilization(device), now
        return {} if self.use is None else {"speed/gpu_use_percent": float(self.use)}

    def _complain(self, pl_module: pl.LightningModule) -> None:
        step = mean(self.recent)
        if step.waiting <= WORTH[pl_module.device.type] * step.whole:
            return
        cause, line = format_bottleneck(step, self.num_workers, cores())
        if cause not in self.said:
            self.said.add(cause)
            pl_module.print(line)

    def summary(self) -> dict[str, float]:
        """Median and 95th percentile of a step; the first one, which warms up, is left out."""
        seconds, shares = sorted(self.seconds[1:] or self.seconds), self.shares[1:] or self.shares
        if not seconds:
            return {}
        return {
            "median_step_seconds": median(seconds),
            "p95_step_seconds": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
            "median_data_wait_share": median(shares),
            "steps_timed": len(seconds),
        }


def format_bottleneck(step: StepTiming, num_workers: int, most_workers: int) -> tuple[str, str]:
    """Which part of making data is slow, and a line that says so and what may help."""
    making, work = sum(step.making.values()), step.whole - step.waiting
    said = (
        f"waiting for data takes {100 * step.waiting / step.whole:.0f} % of a step "
        f"({step.waiting:.3f} of {step.whole:.3f} s)"
    )
    if num_workers and making / num_workers < work:
        made = f"{num_workers} workers make the batches of a step in {making / num_workers:.3f} s"
        return "handing over", f"{said}: {made}, so what is slow is to hand them over"
    slow = max(step.making, key=lambda part: step.making[part])
    made = (
        f"{slow} takes {step.making[slow]:.3f} of the {making:.3f} s that making its batches takes"
    )
    enough = min(most_workers, max(ceil(making / work), num_workers + 1))
    remedies = [f"data.num_workers={enough}"] if enough > num_workers else []
    remedies += [REMEDIES[slow]] if slow in REMEDIES else []
    return slow, f"{said}: {made}" + (f"; try {', or '.join(remedies)}" if remedies else "")


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mean(steps: Collection[StepTiming]) -> StepTiming:
    """Of each figure."""
    parts = sum_parts([step.making for step in steps])
    return StepTiming(
        whole=sum(step.whole for step in steps) / len(steps),
        waiting=sum(step.waiting for step in steps) / len(steps),
        making={part: seconds / len(steps) for part, seconds in parts.items()},
    )


def sum_parts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Part by part."""
    return {name: sum(p[name] for p in parts) for name in parts[0]} if parts else {}
