"""Load the network that is exported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from unet3d.checkpoint_file import extract_weights, load_checkpoint
from unet3d.config.settings.export import ExportSettings
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.types import Triple
from unet3d.workflows.inference.build import resolve_checkpoint
from unet3d.workflows.inference.ensemble import load_network
from unet3d.workflows.inference.model_metadata import validate_metadata


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A checkpoint's network in float32, with its metadata."""

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


def load_trained(settings: ExportSettings) -> TrainedNetwork:
    """Load the network of the one checkpoint."""
    paths = [resolve_checkpoint(path) for path in settings.checkpoints]
    if len(paths) != 1:
        raise UsageError(
            f"checkpoint names {len(paths)} checkpoints, and a file holds one network: export each "
            "and average their logits, as predict does"
        )
    path = paths[0]
    content = load_checkpoint(path)
    metadata = validate_metadata(path, content)
    weights = extract_weights(path, content)
    network = load_network(path, metadata, weights, settings.allow_targets)
    d, h, w = settings.patch_size or metadata["config"]["data"]["patch_size"]
    return TrainedNetwork(network=network, metadata=metadata, patch_size=(d, h, w))


def list_normalizations(preprocessing: Preprocessing, channels: int) -> list[str]:
    """Return the normalization method of each channel."""
    methods = list(preprocessing.normalize)
    return methods if len(methods) == channels else methods * channels
