"""Start the outputs of a network at the class fractions of its training patches."""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from unet3d.data.loading.datasets import compute_class_fractions
from unet3d.errors import UsageError, summarize_error
from unet3d.memory.fake_tensors import copy_as_fake, use_fake_tensors
from unet3d.model.weights import (
    compute_sigmoid_bias,
    compute_softmax_bias,
    find_head_names,
    set_bias,
)
from unet3d.step.config import StepConfig
from unet3d.types import HasHeads

if TYPE_CHECKING:
    from unet3d.training.datamodule import VolumeDataModule


def initialize_head_bias(data: "VolumeDataModule", model: nn.Module) -> list[str]:
    """Let the bias of the heads start at the class fractions of the training patches.

    Return messages about networks that are not ours.
    """
    config, dataset, loader = data.settings.step, data.dataset, data.train_loader
    if not config.network.prior_bias:
        return []
    fractions = compute_class_fractions(
        loader.patches,
        num_classes=len(dataset.classes),
        samples=loader.epoch_sampler.samples,
        foreground_fraction=config.data.foreground_fraction,
    )
    if dataset.regions is None:
        bias = compute_softmax_bias(fractions)
    else:
        by_region = [fractions[list(labels)].sum() for labels in dataset.regions.values()]
        bias = compute_sigmoid_bias(by_region)
    if isinstance(model, HasHeads):
        set_bias(model.list_heads(), bias)
        return []
    names = trace_head_names(model, config, len(dataset.channels), len(bias))
    set_bias([model.get_submodule(name) for name in names], bias)
    if not names:
        return ["model.prior_bias: found no head with a bias, so the outputs start equal"]
    return [
        f"model.prior_bias: the bias of {' and '.join(names)} starts at the class fractions of the "
        "training patches (model.prior_bias=false disables it)"
    ]


def trace_head_names(
    model: nn.Module, config: StepConfig, channels: int, outputs: int
) -> list[str]:
    """Return the names of a network's last convolutions, found by a forward without values."""
    size = config.data.patch_size
    with use_fake_tensors():
        try:
            return find_head_names(copy_as_fake(model), torch.zeros(2, channels, *size), outputs)
        except DataDependentOutputException:  # it reads values
            return []
        except Exception as error:
            problem = f"cannot take patches of {'x'.join(map(str, size))}"
            if isinstance(error, ImportError):
                problem = "needs a package that is not installed"
            message = f"model={config.network.name} {problem}: {summarize_error(error)}"
            raise UsageError(message) from error
