"""Losses of MONAI, torch and users see logits and labels in the form that they take."""

import monai.losses
import pytest
import torch
from torch import nn

from unet3d.config.compose import list_options
from unet3d.config.instantiate import Factory
from unet3d.data.dataset import get_network_sizes
from unet3d.errors import UsageError
from unet3d.loss.build import AdaptedLoss, build_loss, check_loss, choose_arguments
from unet3d.memory.any_network import estimate_memory
from unet3d.step.build import complete_step
from unet3d.types import IGNORE_LABEL

REGIONS = {"whole": (1, 2), "core": (2,)}

SEGMENTATION = (
    *("BoundaryLoss", "DiceCELoss", "DiceFocalLoss", "DiceLoss", "FocalLoss"),
    *("GeneralizedDiceFocalLoss", "GeneralizedDiceLoss", "HausdorffDTLoss", "LogHausdorffDTLoss"),
    *("MCCLoss", "SoftDiceclDiceLoss", "SoftclDiceLoss", "TverskyLoss"),
)
"""Losses of MONAI for one-hot labels, which regions have, too."""

OF_CLASSES = {
    "GeneralizedWassersteinDiceLoss": {"dist_matrix": [[0.0, 1, 1], [1, 0, 0.5], [1, 0.5, 0]]},
    "NACLLoss": {"classes": 3, "dim": 3},
}
"""Losses of MONAI for the class of each voxel."""


VARIANTS = {
    **{name: (f"loss={name}", "data.regions={a:[1,2,3],b:[2,3]}") for name in list_options("loss")},
    "cross_entropy": ("loss=cross_entropy",),
    "topk": ("loss.voxel_loss=topk", "loss.class_weights=[0.1,1,1,2]"),
}


class WithLoss(nn.Module):
    def __init__(self, loss, outputs):
        super().__init__()
        self.conv, self.loss = nn.Conv3d(1, outputs, 1), loss

    def forward(self, x):
        return self.loss(self.conv(x), torch.zeros(2, 8, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_takes_levels_ignored_voxels_and_regions_and_is_estimated(composed, name):
    step = complete_step(composed(*VARIANTS[name], "data.ignore_label=9").step)
    loss, (_, outputs) = step.build_loss(), get_network_sizes(step.data)
    logits, labels = make_batch(outputs)
    loss([logits, torch.randn(2, outputs, 6, 4, 5)], labels).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0
    assert estimate_memory(WithLoss(loss, outputs), (2, 1, 8, 8, 8), device="cpu").peak > 0


def adapt(target, regions=None, **given):
    chosen = choose_arguments(target, given, has_regions=regions is not None)
    return AdaptedLoss(target(**given | chosen), regions)


def make_batch(outputs=3, size=(12, 8, 10)):
    logits = torch.randn(2, outputs, *size, requires_grad=True)
    labels = torch.randint(0, 3, (2, *size), dtype=torch.uint8)
    labels[:, :3] = IGNORE_LABEL
    return logits, labels


@pytest.mark.parametrize("regions", [None, REGIONS], ids=["classes", "regions"])
@pytest.mark.parametrize("name", [*SEGMENTATION, *OF_CLASSES])
def test_a_loss_of_monai_ignores_voxels_and_trains_all_levels(name, regions):
    target, given = getattr(monai.losses, name), OF_CLASSES.get(name, {})
    if regions is not None and name in OF_CLASSES:
        with pytest.raises(UsageError, match=f"{name} takes one class per voxel"):
            adapt(target, regions, **given)
        return
    loss = adapt(target, regions, **given)
    outputs = 3 if regions is None else 2
    check_loss(loss, outputs, 3)
    logits, labels = make_batch(outputs)
    coarse = torch.randn(2, outputs, 6, 4, 5, requires_grad=True)
    value = loss([logits, coarse], labels)
    value.backward()
    assert value.isfinite()
    for grad in (logits.grad, coarse.grad):
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0
    assert not logits.grad[:, :, :3].any()
    changed = logits.detach().clone()
    changed[:, :, :3] = 7.0
    torch.testing.assert_close(loss([changed, coarse.detach()], labels), value.detach())


class Counting(nn.Module):
    """A loss with a state, and a weight that a callback changes."""

    def __init__(self):
        super().__init__()
        self.calls, self.alpha = 0, 1.0

    def forward(self, logits, labels):
        self.calls += 1
        return self.alpha * (logits.softmax(1) - labels).square().mean()


def test_a_loss_with_a_state_is_tried_on_a_copy_and_has_what_a_callback_sets():
    loss = AdaptedLoss(Counting())
    check_loss(loss, 3, 3)
    assert loss.loss.calls == 0
    logits, labels = make_batch()
    first = loss(logits, labels)
    loss.alpha = 2.0
    torch.testing.assert_close(loss(logits, labels), 2 * first)


@pytest.mark.parametrize("name", ["class_weights", "weight"])  # the second is torch's
def test_cross_entropy_gets_the_class_of_each_voxel_and_weights_from_a_list(name):
    logits, labels = make_batch()
    arguments = {"_target_": "torch.nn.CrossEntropyLoss", "reduction": "sum"}
    loss = build_loss(Factory("loss", {**arguments, name: [0.1, 0.3, 0.6]}))
    seen = labels != IGNORE_LABEL
    weights = torch.tensor([0.1, 0.3, 0.6])
    expected = nn.functional.cross_entropy(
        logits.movedim(1, -1)[seen], labels[seen].long(), weights, reduction="sum"
    )
    torch.testing.assert_close(loss(logits, labels), expected)


def test_binary_cross_entropy_learns_regions():
    logits, labels = make_batch(2)
    loss = adapt(nn.BCEWithLogitsLoss, REGIONS, reduction="sum")
    seen = (labels != IGNORE_LABEL)[:, None].expand_as(logits)
    targets = torch.stack([(labels == 1) | (labels == 2), labels == 2], 1).float()
    expected = nn.functional.binary_cross_entropy_with_logits(
        logits[seen], targets[seen], reduction="sum"
    )
    torch.testing.assert_close(loss(logits, labels), expected)


def test_an_activation_that_the_config_names_stays():
    assert "softmax" not in choose_arguments(
        monai.losses.DiceLoss, {"sigmoid": True}, has_regions=False
    )


@pytest.mark.parametrize(
    "name", ["ContrastiveLoss", "BendingEnergyLoss", "BoxGIoULoss", "DiffusionLoss"]
)
def test_a_loss_for_something_else_is_refused_in_one_line(name):
    with pytest.raises(UsageError, match=f"^loss: {name} .*") as caught:
        check_loss(adapt(getattr(monai.losses, name)), 3, 3)
    assert len(str(caught.value).splitlines()) == 1


def test_a_loss_that_trains_two_classes_alone_is_refused_for_more():
    loss = adapt(monai.losses.AsymmetricUnifiedFocalLoss)
    with pytest.raises(UsageError, match=r"FocalLoss does not train output 2: its gradient is 0$"):
        check_loss(loss, 3, 3)
    check_loss(loss, 2, 2)


class TrueLogit(nn.Module):
    takes_classes = True

    def forward(self, logits, classes):
        return -logits.gather(1, classes[:, None]).mean()


def test_a_users_loss_may_take_the_class_of_each_voxel():
    logits, labels = torch.randn(2, 3, 4, 4, 4), torch.full((2, 4, 4, 4), 2)
    torch.testing.assert_close(AdaptedLoss(TrueLogit())(logits, labels), -logits[:, 2].mean())


class OwnOptions(nn.Module):
    def __init__(self, softmax=False, to_onehot_y=True, include_background=True, weight=None):
        super().__init__()
        self.given = softmax, to_onehot_y, include_background, weight


@pytest.mark.parametrize("regions", [None, REGIONS])
def test_a_users_loss_gets_the_options_that_are_set(regions):
    loss = adapt(OwnOptions, regions, include_background=False, weight=[1, 2]).loss
    assert loss.given[:3] == (False, True, False)
    assert loss.given[3].tolist() == [1, 2]


class Weighted(TrueLogit):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_a_users_loss_with_a_weight_that_no_optimizer_has_is_refused():
    with pytest.raises(
        UsageError, match=r"^Weighted has the weight scale, and only weights of the"
    ):
        build_loss(Factory("loss", {"_target_": f"{__name__}.Weighted"}))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 3.0]], ids=["equal", "weighted"])
def test_cross_entropy_leaves_ignored_voxels_out_of_its_mean(smoothing, weight):
    options = {"label_smoothing": smoothing, "weight": weight and torch.tensor(weight)}
    loss = AdaptedLoss(nn.CrossEntropyLoss(**options))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 4, 6, 5, generator=generator).requires_grad_()
    labels = torch.randint(0, 3, (1, 4, 6, 5), generator=generator)
    expected = nn.functional.cross_entropy(logits[:, :, :1], labels[:, :1], **options)
    partly = labels.clone()
    partly[:, 1:] = IGNORE_LABEL
    found = loss(logits, partly.byte())
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)
    nothing = loss(logits, torch.full_like(labels, IGNORE_LABEL).byte())
    assert nothing.isfinite()
    assert not torch.autograd.grad(nothing, logits)[0].any()
