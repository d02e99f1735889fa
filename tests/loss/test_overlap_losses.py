"""Losses of this project equal those of MONAI, in value and gradient."""

import monai.losses
import pytest
import torch
from monai.losses.cldice import soft_skel

from unet3d.errors import UsageError
from unet3d.loss.build import AdaptedLoss
from unet3d.loss.overlap import DiceCE, GeneralizedDice, Tversky
from unet3d.loss.skeleton_recall import SkeletonRecall, skeletonize
from unet3d.types import IGNORE_LABEL

REGIONS = {"whole": (1, 2, 3), "core": (2, 3)}
SMOOTH = {"smooth_nr": 1e-5, "smooth_dr": 1e-5}
NO_SMOOTH = {"smooth_nr": 1e-30, "smooth_dr": 1e-30}


def make_batch(outputs=4, size=(9, 8, 10)):
    torch.manual_seed(1)
    logits = 2 * torch.randn(2, outputs, *size)
    return logits.requires_grad_(), torch.randint(0, 4, (2, *size), dtype=torch.uint8)


def compute(loss, logits, labels):
    value = loss(logits, labels)
    return value.detach(), torch.autograd.grad(value, logits)[0]


def assert_same(ours, theirs, regions=None, largest=3):
    logits, labels = make_batch(4 if regions is None else len(regions))
    labels = labels.clamp(max=largest)
    pairs = [compute(loss, logits, labels) for loss in (ours, AdaptedLoss(theirs, regions))]
    torch.testing.assert_close(*pairs, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("regions", [None, REGIONS], ids=["classes", "regions"])
def test_tversky_and_generalized_dice_are_those_of_monai(regions):
    """Generalized Dice also where a class is absent, which has the weight of the smallest one."""
    activation = {"softmax": regions is None, "sigmoid": regions is not None}
    for batch in (True, False):
        options = {"alpha": 0.3, "beta": 0.7, "batch": batch, **SMOOTH, **activation}
        theirs = monai.losses.TverskyLoss(include_background=regions is not None, **options)
        assert_same(Tversky(batch_dice=batch, regions=regions), theirs, regions)
    for weighting in ("square", "simple", "uniform"):
        options = {"w_type": weighting, "batch": True, **NO_SMOOTH, **activation}
        theirs = monai.losses.GeneralizedDiceLoss(**options)
        ours = GeneralizedDice(weighting=weighting, smooth=1e-30, regions=regions)
        assert_same(ours, theirs, regions)
        assert_same(ours, theirs, regions, largest=1)


@pytest.mark.parametrize("loss", [DiceCE(), Tversky(), GeneralizedDice(), SkeletonRecall()])
def test_torch_confirms_the_gradient(loss):
    logits, labels = make_batch(size=(3, 2, 2))
    logits = logits.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), (logits,))


def test_focal_tversky_has_a_finite_gradient_where_all_is_right():
    _, labels = make_batch()
    certain = torch.nn.functional.one_hot(labels.long(), 4).movedim(-1, 1) * 200.0 - 100
    certain.requires_grad_()
    Tversky(gamma=4 / 3)(certain, labels).backward()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("smooth", [0.5, 10.0])
def test_focal_tversky_is_its_formula_whatever_it_is_smoothed_by(smooth):
    logits, labels = make_batch()
    truth = torch.nn.functional.one_hot(labels.long(), 4).movedim(-1, 1)
    p, axes = logits.softmax(1), (0, 2, 3, 4)
    overlap = (p * truth).sum(axes)
    false = 0.3 * (p.sum(axes) - overlap) + 0.7 * (truth.sum(axes) - overlap)
    index = (overlap + smooth) / (overlap + false + smooth)
    expected = ((1 - index[1:]) ** (3 / 4)).mean()
    result = compute(Tversky(gamma=4 / 3, smooth=smooth), logits, labels)
    torch.testing.assert_close(result, (expected, torch.autograd.grad(expected, logits)[0]))


OWN = {
    "focal_tversky": Tversky(gamma=4 / 3),
    "generalized_dice": GeneralizedDice(),
    "skeleton_recall": SkeletonRecall(),
    "per volume": Tversky(batch_dice=False, ce=1.0),
}


@pytest.mark.parametrize("name", OWN)
def test_ignored_voxels_do_not_change_the_loss(name):
    logits, labels = make_batch()
    labels[:, :2] = IGNORE_LABEL
    value = OWN[name](logits, labels)
    value.backward()
    assert not logits.grad[:, :, :2].any()
    assert logits.grad.any()
    changed = logits.detach().clone()
    changed[:, :, :2] = 9.0
    torch.testing.assert_close(OWN[name](changed, labels), value.detach())
    value, gradient = compute(OWN[name], logits, torch.full_like(labels, IGNORE_LABEL))
    assert value.isfinite()
    assert not gradient.any()


def test_the_skeleton_of_a_mask_is_that_of_monai():
    torch.manual_seed(0)
    smooth = torch.nn.functional.avg_pool3d(torch.randn(2, 1, 30, 32, 28), 5, 1, 2)
    mask = smooth > 0.02
    expected = soft_skel(mask.float(), 4) > 0
    assert 0 < expected.sum() < mask.sum()
    assert torch.equal(skeletonize(mask, 4), expected)


def test_skeleton_recall_is_the_mean_probability_in_the_tube():
    labels = torch.zeros(1, 12, 12, 12, dtype=torch.uint8)
    labels[:, :, :6, :6] = IGNORE_LABEL  # is no structure
    labels[:, :, 5, 5] = 1
    labels[:, 6:, 5, 5] = 2
    logits = torch.zeros(1, 3, 12, 12, 12, requires_grad=True)
    extra = SkeletonRecall(recall=2.0)(logits, labels) - DiceCE()(logits, labels)
    torch.testing.assert_close(extra, torch.tensor(2 * (1 - 1 / 3)))
    gradient = torch.autograd.grad(extra, logits)[0]
    assert gradient[0, 1, 2, 5, 5] < 0
    assert not gradient[:, :, :, 8:].any()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Tversky(alpha=0.0, beta=0.0),
        lambda: Tversky(gamma=0.0),
        lambda: GeneralizedDice(ce=-1.0),
        lambda: GeneralizedDice(weighting="cubic"),
        lambda: SkeletonRecall(iterations=0),
    ],
)
def test_invalid_options_are_an_error(build):
    with pytest.raises(UsageError, match=r"loss needs|got cubic"):
        build()


@pytest.mark.parametrize("build", [DiceCE, Tversky, SkeletonRecall])
def test_one_output_has_no_foreground_to_count(build):
    logits, labels = torch.zeros(1, 1, 4, 4, 4), torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    with pytest.raises(UsageError, match="one output, the background"):
        build()(logits, labels)
    assert GeneralizedDice()(logits, labels).isfinite()
