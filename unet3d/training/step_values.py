"""Log a step's values without waiting for the device."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch


def log_values(pl_module: pl.LightningModule, values: Mapping[str, float], **options: Any) -> None:
    """Log plain numbers.

    Lightning would copy a number to the device and read it again for the logger, and the host would
    wait for the device each time. Tensors on the CPU stay where they are.
    """
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    pl_module.log_dict(tensors, **options)
