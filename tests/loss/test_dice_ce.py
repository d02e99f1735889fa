import pytest
import torch

from unet3d.errors import UsageError
from unet3d.loss import dice_terms
from unet3d.loss.dice_ce import DiceCE, resize_labels
from unet3d.loss.dice_ce_reference import dice_bce, dice_ce
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
    expected = dice_ce(logits, labels, dice=dice, ce=ce, batch_dice=batch_dice)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_dice", [True, False])
@pytest.mark.parametrize("chunk", [10, 10**6])
def test_overlapping_regions_equal_the_reference(monkeypatch, batch_dice, chunk):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    logits, labels = make_sample()
    regions = {"whole": [1, 2, 3], "core": [2, 3], "tip": 3, "left": [1]}
    result = DiceCE(regions=regions, batch_dice=batch_dice)(logits, labels)
    expected = dice_bce(logits, labels, [[1, 2, 3], [2, 3], [3], [1]], batch_dice=batch_dice)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("regions", [None, {"a": [1, 2], "b": [2], "c": [3], "d": [1]}])
def test_backward_saves_only_the_logits_and_the_labels(regions):
    logits, labels = make_sample(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        DiceCE(regions=regions)(logits, labels)
    large = [t for t in saved if t.dim() >= labels.dim()]
    assert {(t.dtype, t.shape) for t in large} == {
        (logits.dtype, logits.shape),
        (labels.dtype, labels.shape),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_give_a_float32_loss(dtype):
    logits, labels = make_sample(dtype)
    loss = DiceCE()(logits, labels)
    assert loss.dtype == torch.float32
    loss.backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), dice_ce(logits.double(), labels), rtol=1e-5, atol=0)


def test_ignored_voxels_do_not_change_the_loss():
    logits, labels = make_sample()
    loss = DiceCE()(logits, labels)
    changed = logits.detach().clone()
    changed[:, :, 0] += torch.randn_like(changed[:, :, 0])
    torch.testing.assert_close(DiceCE()(changed, labels), loss, rtol=0, atol=1e-15)
    loss.backward()
    assert logits.grad[:, :, 0].abs().max() == 0


def test_a_batch_without_labeled_voxels_gives_no_nan():
    logits, labels = make_sample()
    loss = DiceCE()(logits, torch.full_like(labels, IGNORE_LABEL))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.abs().max() == 0


def test_deep_supervision_halves_the_weight_of_each_coarser_output():
    fine, labels = make_sample()
    coarse = torch.randn(2, 4, 2, 3, 3, dtype=torch.float64)
    loss = DiceCE()
    both = loss([fine, coarse], labels)
    apart = loss(fine, labels) + 0.5 * loss(coarse, resize_labels(labels, (2, 3, 3)))
    torch.testing.assert_close(both, apart / 1.5, rtol=1e-12, atol=0)


def test_labels_are_resized_to_the_nearest_voxel():
    labels = torch.arange(4).repeat_interleave(2)[None, :, None, None]
    assert resize_labels(labels, (4, 1, 1)).flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [{"dice": -1.0}, {"dice": 0.0, "ce": 0.0}, {"smooth": 0.0}])
def test_invalid_weights_are_an_error(bad):
    with pytest.raises(UsageError, match="loss needs"):
        DiceCE(**bad)
