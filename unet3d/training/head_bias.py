"""Initialize the bias of the network's heads from the class fractions of training patches."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from unet3d.data.dataset import ResolvedDataset
from unet3d.data.loading.datasets import compute_class_fractions
from unet3d.data.loading.loaders import TrainLoader
from unet3d.errors import UsageError, summarize_error
from unet3d.memory.any_network import copy_as_fake
from unet3d.memory.step.config import StepConfig
from unet3d.model.head_bias import compute_sigmoid_bias, compute_softmax_bias, find_heads, set_bias
from unet3d.types import HasHeads


def initialize_head_bias(
    model: nn.Module, config: StepConfig, dataset: ResolvedDataset, loader: TrainLoader
) -> list[str]:
    """Set the bias of the network's heads; return messages about networks that are not ours."""
    if not config.network.prior_bias:
        return []
    fractions = compute_class_fractions(
        loader.patches,
        num_classes=len(dataset.classes),
        samples=loader.epoch_sampler.samples,
        foreground_fraction=config.data.foreground_fraction,
    )
    bias = compute_head_bias(fractions, dataset.regions)
    if isinstance(model, HasHeads):
        set_bias(model.list_heads(), bias)
        return []
    names = trace_heads(model, config, dataset, len(bias))
    set_bias([model.get_submodule(name) for name in names], bias)
    if not names:
        return ["model.prior_bias: found no head with a bias, so the outputs start equal"]
    return [
        f"model.prior_bias: the bias of {' and '.join(names)} starts at the class fractions of the "
        "training patches (model.prior_bias=false disables it)"
    ]


def compute_head_bias(
    fractions: np.ndarray, regions: Mapping[str, Sequence[int]] | None
) -> list[float]:
    """Return the bias of each output: of a class, or of a region."""
    if regions is None:
        return compute_softmax_bias(fractions)
    return compute_sigmoid_bias([fractions[list(labels)].sum() for labels in regions.values()])


def trace_heads(
    model: nn.Module, config: StepConfig, dataset: ResolvedDataset, num_outputs: int
) -> list[str]:
    """Return the names of a network's last convolutions, found by a forward without values."""
    size = config.data.patch_size
    with FakeTensorMode():
        network = copy_as_fake(model)
        image = torch.zeros(2, len(dataset.channels), *size)
        try:
            return find_heads(network, image, num_outputs)
        except DataDependentOutputException:  # it reads values
            return []
        except Exception as error:
            problem = f"cannot take patches of {'x'.join(map(str, size))}"
            if isinstance(error, ImportError):
                problem = "needs a package that is not installed"
            message = f"model={config.network.name} {problem}: {summarize_error(error)}"
            raise UsageError(message) from error
