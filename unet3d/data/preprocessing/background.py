"""Find the background of a volume: its value where nothing was scanned."""

from collections.abc import Sequence

import numpy as np

from unet3d.data.preprocessing.channels import find_border_value
from unet3d.errors import UsageError

AUTO = "auto"
"""Instead of a number: the constant border value, found for each channel of each case."""

Background = tuple[float | str, ...]
"""Numbers or AUTO: one for all channels, or one per channel."""


def choose_background(channels: Sequence[str]) -> Background:
    """Return AUTO for every channel except CT, in which air is an ordinary value."""
    return tuple(0 if name.upper() == "CT" else AUTO for name in channels)


def repeat_per_channel(background: Background, channels: int) -> Background:
    """Return one value per channel."""
    return background if len(background) > 1 else background * channels


def find_background(channels: np.ndarray, background: Background) -> list[float]:
    """Return the value of each channel (C, D, H, W); AUTO gives 0 if the border is not constant."""
    values = repeat_per_channel(background, len(channels))
    if len(values) != len(channels):
        raise UsageError(
            f"data.background must be one value or one for each of the {len(channels)} channels, "
            f"got {list(background)}"
        )
    return [
        (find_border_value(channel) or 0.0) if value == AUTO else float(value)
        for channel, value in zip(channels, values, strict=True)
    ]
