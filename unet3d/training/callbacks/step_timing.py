"""Time every training step, and find what makes steps wait for data."""

import time
from array import array
from collections import Counter
from collections.abc import Mapping
from math import ceil
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from unet3d import peak_memory
from unet3d.machine import count_usable_cores
from unet3d.training.loggers import log_values

WINDOW = 50  # steps averaged before a warning about waiting for data

MAX_WAIT_FRACTION = {"cuda": 0.02, "cpu": 0.1}
"""Fraction of a step from which waiting is worth a warning; without workers a CPU always waits."""

ADVICE = {
    "reading": "data.cache on a faster disk",
    "augmenting": "augmentation=light or none",
}
"""What makes a part of loading cheaper."""


class StepTimer(Callback):
    """Time each optimizer step from the end of the previous one, including waiting for data."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self.start = 0.0
        self.volumes = 0
        self.batches: list[Any] = []  # waits and loading times of this step's micro-batches
        self.stepping = False  # whether this batch ends with an optimizer step
        self.seconds, self.shares = array("d"), array("d")  # of every step
        self.recent: Any = Counter()  # seconds of the latest steps: in all, waiting, and by part
        self.gpu_utilization: int | None = None  # percent
        self.queried_at = 0.0
        self.warned = False

    def on_train_epoch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.volumes += len(batch["image"])
        self.batches.append((batch["wait"], batch["seconds"]))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.stepping = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self.stepping:
            return
        now = time.perf_counter()
        total = now - self.start
        # The host has read this step's loss, so the GPU is done with the batch: no extra sync.
        waiting = sum(wait.get_seconds() for wait, _ in self.batches)
        self.seconds.append(total)
        self.shares.append(waiting / total)
        self.recent.update(total=total, waiting=waiting)
        for _, parts in self.batches:
            self.recent.update(parts)
        values = {
            "speed/step_seconds": total,
            "speed/volumes_per_second": self.volumes / total,
            "speed/data_wait_fraction": waiting / total,
        }
        log_values(pl_module, values | self._query_gpu(pl_module.device, now))
        self.start, self.volumes, self.batches, self.stepping = now, 0, [], False
        if len(self.seconds) % WINDOW == 1:  # step 1 is warmup
            if len(self.seconds) > WINDOW and not self.warned:
                step = {part: seconds / WINDOW for part, seconds in self.recent.items()}
                if step["waiting"] > MAX_WAIT_FRACTION[pl_module.device.type] * step["total"]:
                    self.warned = True
                    cores = count_usable_cores()
                    pl_module.print(format_bottleneck(step, self.num_workers, cores))
            self.recent.clear()

    def _query_gpu(self, device: torch.device, now: float) -> dict[str, float]:
        """Return the driver's utilization, queried once a second; it samples a few times."""
        if device.type == "cuda" and now - self.queried_at >= 1:
            self.gpu_utilization, self.queried_at = peak_memory.get_utilization(device), now
        if self.gpu_utilization is None:
            return {}
        return {"speed/gpu_utilization_percent": float(self.gpu_utilization)}

    def summarize(self) -> dict[str, float]:
        """Return median and 95th percentile over all steps but the first, which is warmup."""
        seconds, shares = sorted(self.seconds[1:] or self.seconds), self.shares[1:] or self.shares
        if not seconds:
            return {}
        return {
            "median_step_seconds": median(seconds),
            "p95_step_seconds": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
            "median_data_wait_fraction": median(shares),
            "steps_timed": len(seconds),
        }


def format_bottleneck(step: Mapping[str, float], num_workers: int, max_workers: int) -> str:
    """Return a line about the seconds of a step: in all, waiting for data, and loading by part."""
    parts = {part: seconds for part, seconds in step.items() if part not in ("total", "waiting")}
    loading, computing = sum(parts.values()), step["total"] - step["waiting"]
    part = max(parts, key=parts.__getitem__)
    enough = min(max_workers, max(ceil(loading / computing), num_workers + 1))
    advice = [f"data.num_workers={enough}"] if enough > num_workers else []
    advice += [ADVICE[part]] if part in ADVICE else []
    return (
        f"waiting for data takes {100 * step['waiting'] / step['total']:.0f}% of a step "
        f"({step['waiting']:.3f} of {step['total']:.3f} s): {part} takes {parts[part]:.3f} of the "
        f"{loading:.3f} s to load its batches" + (f"; try {', or '.join(advice)}" if advice else "")
    )
