"""The first bias of the head, from the class shares of the training samples."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import build_network, parse_regions
from unet3d.data.loading.class_fractions import compute_class_fractions
from unet3d.data.loading.loaders import TrainLoader
from unet3d.model.prior_bias import find_heads, set_bias, sigmoid_bias, softmax_bias
from unet3d.types import HasOutputConvolutions


def initialize_output_bias(
    model: nn.Module, request: ComposedConfig, feed: TrainLoader
) -> list[str]:
    """Set the bias of the network's heads; return what to say of a network that is not ours."""
    data = request.config.data
    if not request.config.model.get("prior_bias", True):
        return []
    shares = compute_class_fractions(
        feed.patches,
        num_classes=data.num_classes,
        samples=feed.order.samples,
        foreground_fraction=data.foreground_fraction,
    )
    bias = compute_output_bias(shares, parse_regions(request.config))
    if isinstance(model, HasOutputConvolutions):
        set_bias(model.output_convolutions(), bias)
        return []
    names = trace_output_convolutions(request, len(bias))
    set_bias([model.get_submodule(name) for name in names], bias)
    if not names:
        return [
            "model.prior_bias: no last convolution with a bias was found; its outputs begin equal"
        ]
    return [
        f"model.prior_bias: the bias of {' and '.join(names)} begins at the class shares of the "
        "training patches (model.prior_bias=false leaves it)"
    ]


def compute_output_bias(
    shares: np.ndarray, regions: Mapping[str, Sequence[int]] | None
) -> list[float]:
    """Return the bias of each output of the head: a class's, or a region's."""
    if regions is None:
        return softmax_bias(shares)
    return sigmoid_bias([shares[list(labels)].sum() for labels in regions.values()])


def trace_output_convolutions(request: ComposedConfig, outputs: int) -> list[str]:
    """Find the last convolutions of a network by a forward without values."""
    data = request.config.data
    with FakeTensorMode():
        image = torch.zeros(2, data.in_channels, *data.patch_size)
        return find_heads(build_network(request), image, outputs)
