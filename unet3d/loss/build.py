"""Build the loss; those of MONAI, torch and users are given labels in the form that they take.

Signatures were read in MONAI 1.6.1.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.config.instantiate import Factory
from unet3d.errors import UsageError, summarize_error
from unet3d.loss.deep_supervision import average_levels, split_levels
from unet3d.loss.partial_labels import PartialLabels
from unet3d.text import join_first
from unet3d.types import IGNORE_LABEL, get_ignore_label

CERTAIN_LOGIT = 30.0
"""Logit of the right class where a label is ignored: its cross-entropy is below 1e-25."""

TAKES_CLASSES = (
    *("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"),
    *("GeneralizedWassersteinDiceLoss", "NACLLoss"),
)
"""Losses of torch and MONAI that take the class of each voxel; the others take one-hot labels."""

OWN_PACKAGE = "unet3d.loss."

ACTIVATIONS = ("softmax", "sigmoid", "other_act")
TENSORS = ("weight", "pos_weight", "dist_matrix")
"""Arguments that a config holds as lists."""


def build_loss(
    factory: Factory,
    *,
    regions: Mapping[str, Sequence[int]] | None = None,
    unannotated_classes: Mapping[int, Sequence[int]] | None = None,
) -> nn.Module:
    """Build the configured loss.

    `unannotated_classes` are those that cases of a label do not annotate; None: all annotate all.
    """
    if factory.target.__module__.startswith(OWN_PACKAGE):
        loss = factory()
        loss.check_labels = None  # preprocessing has done it
    else:
        given = dict(factory.arguments)
        if "class_weights" in given and "weight" in inspect.signature(factory.target).parameters:
            given["weight"] = given.pop("class_weights")  # as torch and MONAI call it
            factory = replace(factory, arguments=given)
        chosen = choose_arguments(
            factory.target, factory.arguments, has_regions=regions is not None
        )
        loss = AdaptedLoss(factory(**chosen), regions)
        if trained := [name for name, p in loss.named_parameters() if p.requires_grad]:
            name = trained[0].removeprefix("loss.")
            raise UsageError(
                f"{factory.target.__name__} has the weight {name}, and only weights of the network "
                "are trained: set requires_grad to False, or move it to the network"
            )
    if unannotated_classes is None:
        return loss
    if factory.arguments.get("label_smoothing"):
        raise UsageError(
            "loss.label_smoothing gives every class a part of each label, which data.annotated "
            "cannot know: set it to 0"
        )
    if factory.arguments.get("sigmoid"):
        raise UsageError("loss.sigmoid: data.annotated adds up probabilities of a softmax")
    return PartialLabels(loss, unannotated_classes)


def is_known(target: Any) -> bool:
    """Return whether a loss is one of MONAI or torch, or inherits from one."""
    bases = {*getattr(target, "__mro__", ())} - {*nn.modules.loss._Loss.__mro__}
    return any(base.__module__.split(".")[0] in ("monai", "torch") for base in bases)


def choose_arguments(target: Any, given: Mapping[str, Any], *, has_regions: bool) -> dict[str, Any]:
    """Return arguments with which a loss of MONAI takes logits and one-hot labels.

    `given` ones stay, but lists become tensors. A user's own loss does what it is asked for.

    >>> from monai.losses import DiceLoss
    >>> choose_arguments(DiceLoss, {"include_background": False}, has_regions=False)
    {'to_onehot_y': False, 'softmax': True}
    """
    known, chosen = inspect.signature(target).parameters, dict[str, Any]()
    if is_known(target):
        chosen["to_onehot_y"] = False
        if not any(name in given for name in ACTIVATIONS):
            chosen["sigmoid" if has_regions else "softmax"] = True
        if "use_softmax" not in given:
            chosen["use_softmax"] = not has_regions
        if has_regions:
            chosen["include_background"] = True  # regions do not have one
    for name in TENSORS:
        if given.get(name) is not None:
            chosen[name] = torch.tensor(given[name], dtype=torch.float)
    return {name: value for name, value in chosen.items() if name in known}


class AdaptedLoss(nn.Module):
    """Call a loss with float32 logits (B, K, D, H, W), and labels in the form that it takes.

    Labels are one-hot (B, K, D, H, W), or the class of each voxel (B, D, H, W) for TAKES_CLASSES
    and for losses with the attribute `takes_classes`. Where a label is IGNORE_LABEL, the network
    gets no gradient: the loss sees a certain and correct prediction of the background, or leaves
    the voxel out, if it has an `ignore_index`. Deep supervision is that of DiceCE.
    """

    def __init__(self, loss: nn.Module, regions: Mapping[str, Sequence[int]] | None = None):
        super().__init__()
        self.regions = None if regions is None else [list(labels) for labels in regions.values()]
        self.takes_classes = getattr(loss, "takes_classes", type(loss).__name__ in TAKES_CLASSES)
        self.ignores = self.takes_classes and isinstance(getattr(loss, "ignore_index", None), int)
        self.loss = loss  # the last: from now on, it gets its attributes
        if self.takes_classes and regions is not None:
            raise UsageError(f"{type(loss).__name__} takes one class per voxel, not data.regions")

    def __setattr__(self, name: str, value: Any) -> None:
        """Give the loss what a callback sets, such as a weight that grows."""
        loss = self.__dict__.get("_modules", {}).get("loss")
        is_own = name in self.__dict__ or hasattr(type(self), name)
        owner: Any = super() if is_own or not hasattr(loss, name) else loss
        owner.__setattr__(name, value)

    def forward(self, logits: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        """Logits (B, K, D, H, W), or a list of them, and labels (B, D, H, W) -> scalar."""
        levels = split_levels(logits, labels, None if self.regions is None else IGNORE_LABEL)
        losses = [self._compute_one(*level) for level in levels]
        return average_levels(torch.stack(losses))

    def _compute_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            ignored = labels == get_ignore_label(labels)
            labels = labels.long().masked_fill(ignored, 0)
            certain = logits.new_full(
                (logits.shape[1], 1, 1, 1), -CERTAIN_LOGIT, dtype=torch.float32
            )
            if self.regions is None:
                certain[0] = CERTAIN_LOGIT
            visible = torch.where(ignored[:, None], certain, logits.float())
            if self.ignores:  # but a mean over no voxel would be NaN
                index: Any = self.loss.ignore_index
                labels = labels.masked_fill(ignored & ~ignored.all(), index)
            return self.loss(visible, self._shape_labels(labels, logits.shape[1]))

    def _shape_labels(self, labels: Tensor, classes: int) -> Tensor:
        if self.takes_classes:
            return labels
        if self.regions is None:
            return F.one_hot(labels, classes).movedim(-1, 1).float()
        parts = [sum(labels == label for label in part) for part in self.regions]
        return torch.stack([torch.as_tensor(part) for part in parts], dim=1).float()


def check_loss(loss: nn.Module, outputs: int, num_classes: int) -> None:
    """Refuse a loss that does not give a scalar with a gradient of each class for a small patch."""
    named = loss
    while isinstance(named, AdaptedLoss | PartialLabels):
        named = named.loss
    with suppress(Exception):  # some cannot be copied
        loss = deepcopy(loss)  # which may count its calls
    shape, generator = (2, outputs, 16, 16, 16), torch.Generator().manual_seed(0)
    logits = torch.rand(shape, generator=generator).requires_grad_()
    labels = (torch.arange(16**3) % num_classes).view(16, 16, 16).expand(2, -1, -1, -1)
    try:
        loss(logits, labels).backward()
    except UsageError:
        raise
    except Exception as error:  # it is any class
        raise UsageError(
            f"loss: {type(named).__name__} cannot train a segmentation: with logits of "
            f"{list(logits.shape)} and labels it fails: {summarize_error(error)}"
        ) from error
    assert logits.grad is not None
    trained = (logits.grad != 0).transpose(0, 1).flatten(1).any(1)
    if untrained := [str(n) for n in range(1, outputs) if not trained[n]]:
        raise UsageError(
            f"loss: {type(named).__name__} does not train output {join_first(untrained)}: its "
            "gradient is 0"
        )
