import pytest
import torch

from tests.loss.helpers.reference import dice_bce, dice_ce
from unet3d.errors import UsageError
from unet3d.loss import dice_terms
from unet3d.loss.overlap import DiceCE
from unet3d.types import IGNORE_LABEL


def make_sample(dtype=torch.float64, ignored=True):
    logits = torch.randn(2, 4, 5, 6, 7, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 4, (2, 5, 6, 7)).to(torch.uint8)
    if ignored:
        labels[:, 0] = IGNORE_LABEL
    return logits, labels


@pytest.mark.parametrize("batch_dice", [True, False])
@pytest.mark.parametrize("parts", [(1.0, 1.0), (1.0, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("chunk", [10, 400, 10**6])
def test_value_and_gradient_equal_the_reference(monkeypatch, batch_dice, parts, chunk):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    logits, labels = make_sample()
    dice, ce = parts
    result = DiceCE(dice=dice, ce=ce, batch_dice=batch_dice)(logits, labels)
    expected = dice_ce(logits, labels, dice_weight=dice, ce=ce, batch_dice=batch_dice)
    assert_equal(result, expected, logits)


VOXEL_LOSSES = {
    "weights": ({}, {}),
    "focal": ({"voxel_loss": "focal", "gamma": 2.0}, {"gamma": 2.0}),
    "focal-1": ({"voxel_loss": "focal", "gamma": 1.0}, {"gamma": 1.0}),
    "smoothing": ({"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "topk": ({"voxel_loss": "topk", "topk": 0.2}, {"topk": 0.2}),
    "topk-all": ({"voxel_loss": "topk", "topk": 1.0}, {}),
}


@pytest.mark.parametrize("kind", VOXEL_LOSSES)
@pytest.mark.parametrize("weights", [None, [0.25, 1.0, 0.0, 3.0]])
@pytest.mark.parametrize("chunk", [10, 400, 10**6])
def test_voxel_losses_equal_the_reference(monkeypatch, kind, weights, chunk):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    logits, labels = make_sample()
    given, expected = VOXEL_LOSSES[kind]
    assert_equal(
        DiceCE(class_weights=weights, **given)(logits, labels),
        dice_ce(logits, labels, class_weights=weights, **expected),
        logits,
    )


@pytest.mark.parametrize("kind", ["weights", "focal", "focal-1", "smoothing"])
@pytest.mark.parametrize(
    ("weights", "chunk", "batch"), [(None, 10, False), ([0.25, 1.0, 0.0, 3.0], 10**6, True)]
)
def test_losses_of_overlapping_regions_equal_the_reference(
    monkeypatch, kind, weights, chunk, batch
):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    logits, labels = make_sample()
    regions = {"whole": [1, 2, 3], "core": [2, 3], "tip": 3, "left": [1]}
    given, expected = VOXEL_LOSSES[kind]
    options = {"class_weights": weights, "batch_dice": batch}
    assert_equal(
        DiceCE(regions=regions, **options, **given)(logits, labels),
        dice_bce(logits, labels, [[1, 2, 3], [2, 3], [3], [1]], **options, **expected),
        logits,
    )


def assert_equal(result, expected, logits):
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_voxels_with_equal_cross_entropy_share_the_rest_of_topk():
    logits = torch.zeros(1, 2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    DiceCE(dice=0.0, voxel_loss="topk", topk=0.25)(logits, labels).backward()
    torch.testing.assert_close(logits.grad[:, 0], torch.full((1, 4, 4, 4), -0.5 / 64).double())


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_a_certain_voxel_has_a_finite_focal_gradient(gamma):
    logits = torch.tensor([60.0, -60.0, 0.0]).view(1, 3, 1, 1, 1).repeat(1, 1, 1, 1, 3)
    logits.requires_grad_()
    DiceCE(voxel_loss="focal", gamma=gamma)(logits, torch.arange(3).view(1, 1, 1, 3)).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_loss_of_half_precision_logits_is_computed_in_float32(dtype):
    logits, labels = make_sample(dtype)
    loss = DiceCE()(logits, labels)
    torch.testing.assert_close(loss.double(), dice_ce(logits.double(), labels), rtol=1e-5, atol=0)


def test_a_batch_without_labeled_voxels_gives_no_nan():
    logits, labels = make_sample()
    loss = DiceCE()(logits, torch.full_like(labels, IGNORE_LABEL))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize("bad", [{"dice": -1.0}, {"dice": 0.0, "ce": 0.0}, {"smooth": 0.0}])
def test_invalid_weights_are_an_error(bad):
    with pytest.raises(UsageError, match="loss needs"):
        DiceCE(**bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"voxel_loss": "mse"}, "is ce, focal or topk, got mse"),
        ({"label_smoothing": 1.0}, "0 <= label_smoothing < 1"),
        ({"label_smoothing": 0.1, "voxel_loss": "topk"}, "goes with loss.voxel_loss=ce"),
        ({"voxel_loss": "focal", "gamma": 0.5}, "gamma is at least 1, got 0.5"),
        ({"voxel_loss": "topk", "topk": 10}, "share of the voxels, 0 < topk <= 1, got 10"),
        ({"voxel_loss": "topk", "regions": {"a": [1]}}, "topk takes one class per voxel"),
        *(({"class_weights": w}, "list of numbers >= 0, not all 0") for w in ([0.0, 0], 1, ["a"])),
        ({"class_weights": [1.0, 2.0]}, "has 2 weights, the network 4 outputs"),
    ],
)
def test_invalid_options_are_explained(bad, message):
    with pytest.raises(UsageError, match=message):
        DiceCE(**bad)(*make_sample())
