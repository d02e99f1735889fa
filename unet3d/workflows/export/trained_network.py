"""Load the network that is exported."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unet3d.config.settings.export import ExportSettings
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.types import Triple
from unet3d.workflows.inference.ensemble import load_members


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A checkpoint's network in float32, with its metadata."""

    path: Path  # of its checkpoint
    network: nn.Module
    metadata: Mapping[str, Any]
    patch_size: Triple

    @property
    def channels(self) -> list[str]:
        """Return the names of the input channels."""
        return list(self.metadata["channels"])

    @property
    def outputs(self) -> list[str]:
        """Return the name of each output: a class or a region."""
        return list(self.metadata.get("regions") or self.metadata["classes"])


def load_trained(settings: ExportSettings) -> list[TrainedNetwork]:
    """Load the networks of the checkpoints, which predict together."""
    return [
        TrainedNetwork(
            path=member.path,
            network=member.network,
            metadata=member.metadata,
            patch_size=settings.patch_size or member.patch_size,
        )
        for member in load_members(settings.checkpoints, settings.allow_targets)
    ]


def list_normalizations(preprocessing: Preprocessing, channels: int) -> list[str]:
    """Return the normalization method of each channel."""
    methods = list(preprocessing.normalize)
    return methods if len(methods) == channels else methods * channels
