"""Dice + cross-entropy and its variants equal plain PyTorch, chunk by chunk."""

import pytest
import torch

from tests.loss.helpers.reference import dice_bce, dice_ce
from unet3d.errors import UsageError
from unet3d.loss import dice_terms
from unet3d.loss.build import AdaptedLoss
from unet3d.loss.kernels import cpu
from unet3d.loss.overlap import DiceCE
from unet3d.loss.partial_labels import PartialLabels
from unet3d.types import IGNORE_LABEL, MAX_CLASSES

KINDS = {
    "dice": ({"ce": 0.0}, {"ce": 0.0}),
    "cross-entropy": ({"dice": 0.0, "ce": 2.0}, {"dice_weight": 0.0, "ce": 2.0}),
    "per volume": ({"batch_dice": False}, {"batch_dice": False}),
    "focal": ({"voxel_loss": "focal", "gamma": 2.0}, {"gamma": 2.0}),
    "focal-1": ({"voxel_loss": "focal", "gamma": 1.0}, {"gamma": 1.0}),
    "smoothing": ({"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "topk": ({"voxel_loss": "topk", "topk": 0.2}, {"topk": 0.2}),
    "topk-all": ({"voxel_loss": "topk", "topk": 1.0}, {}),
}
"""Options of the loss and of the reference."""


def make_sample(dtype=torch.float64):
    logits = torch.randn(2, 4, 5, 6, 7, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 4, (2, 5, 6, 7)).to(torch.uint8)
    labels[:, 0] = IGNORE_LABEL
    return logits, labels


def assert_equal(result, expected, logits):
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "chunk"), [(None, 10), ([0.25, 1.0, 0.0, 3.0], 400), ([0.25, 1.0, 0.0, 3.0], 10**6)]
)
def test_losses_equal_the_reference(monkeypatch, kind, weights, chunk):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    logits, labels = make_sample()
    given, expected = KINDS[kind]
    assert_equal(
        DiceCE(class_weights=weights, **given)(logits, labels),
        dice_ce(logits, labels, class_weights=weights, **expected),
        logits,
    )


@pytest.mark.parametrize("kind", ["per volume", "focal", "focal-1", "smoothing"])
@pytest.mark.parametrize(("weights", "chunk"), [(None, 10), ([0.25, 1.0, 0.0, 3.0], 10**6)])
def test_losses_of_overlapping_regions_equal_the_reference(monkeypatch, kind, weights, chunk):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    logits, labels = make_sample()
    regions = {"whole": [1, 2, 3], "core": [2, 3], "tip": 3, "left": [1]}
    given, expected = KINDS[kind]
    assert_equal(
        DiceCE(regions=regions, class_weights=weights, **given)(logits, labels),
        dice_bce(logits, labels, [[1, 2, 3], [2, 3], [3], [1]], class_weights=weights, **expected),
        logits,
    )


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("batch_dice", [True, False])
def test_compiled_kernels_equal_the_reference(dtype, layout, batch_dice):
    assert cpu.kernels.library(dtype)
    logits, labels = make_sample(dtype)
    logits = (8 * logits.detach()).contiguous(memory_format=layout).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    loss = DiceCE(batch_dice=batch_dice)(logits, labels)
    expected = dice_ce(exact, labels, batch_dice=batch_dice)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), rtol=1e-2, atol=1e-7)


def test_compiled_kernels_keep_a_nan():
    assert cpu.kernels.library(torch.float32)
    logits, labels = make_sample(torch.float32)
    logits.data[1, 2, 3, 3, 3] = torch.nan
    loss = DiceCE()(logits, labels)
    loss.backward()
    assert loss.isnan()
    assert logits.grad[1, :, 3, 3, 3].isnan().all()


def test_a_batch_without_labeled_voxels_gives_no_nan():
    logits, labels = make_sample()
    loss = DiceCE()(logits, torch.full_like(labels, IGNORE_LABEL))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"dice": -1.0}, "loss needs"),
        ({"dice": 0.0, "ce": 0.0}, "loss needs"),
        ({"smooth": 0.0}, "loss needs"),
        ({"voxel_loss": "mse"}, "is ce, focal or topk, got mse"),
        ({"label_smoothing": 1.0}, "0 <= label_smoothing < 1"),
        ({"label_smoothing": 0.1, "voxel_loss": "topk"}, "goes with loss.voxel_loss=ce"),
        ({"voxel_loss": "focal", "gamma": 0.5}, "gamma is at least 1, got 0.5"),
        ({"voxel_loss": "topk", "topk": 10}, "share of the voxels, 0 < topk <= 1, got 10"),
        ({"voxel_loss": "topk", "regions": {"a": [1]}}, "topk takes one class per voxel"),
        ({"class_weights": [0.0, 0.0]}, "list of numbers >= 0, not all 0"),
        ({"class_weights": {"liver": 2.0}}, "list of numbers >= 0, not all 0"),
        ({"class_weights": [-1.0, 1.0]}, "list of numbers >= 0, not all 0"),
        ({"class_weights": [1.0, 2.0]}, "has 2 weights, the network 4 outputs"),
        ({"regions": {"a": [1, 2], "b": [2]}}, "has 2 regions, the network 4 outputs"),
    ],
)
def test_invalid_options_are_explained(bad, message):
    with pytest.raises(UsageError, match=message):
        DiceCE(**bad)(*make_sample())


@pytest.mark.parametrize(
    "shape", [(1, 6, 7, 8), (2, 1, 6, 7, 8), (2, 8, 7, 6), (2, 3, 7, 8), (2, 1, 1, 1)]
)
def test_labels_of_another_shape_than_the_logits_are_refused(shape):
    """Kernels would read past the end of a smaller batch; only coarser levels resample labels."""
    with pytest.raises(UsageError, match=r"need labels \(B, D, H, W\) of the same batch and size"):
        DiceCE()(torch.randn(2, 3, 6, 7, 8), torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("kernel", [True, False])
def test_labels_of_more_than_255_classes_give_what_bytes_give(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(dice_terms, "_has_kernels", lambda *given: False)
    logits, labels = make_sample(torch.float32)
    many = torch.where(labels == IGNORE_LABEL, MAX_CLASSES, labels.short())
    results = [
        (loss := DiceCE()(logits, given), *torch.autograd.grad(loss, logits))
        for given in (labels, many)
    ]
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


INTEGERS = [torch.int16, torch.uint16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ["ours", "of torch", "partly labeled"])
def test_labels_of_any_integer_type_ignore_255(dtype, name):
    """Files of labels are often int16."""
    logits, labels = make_sample(torch.float32)
    plain = AdaptedLoss(torch.nn.CrossEntropyLoss())
    loss = {"ours": DiceCE(), "of torch": plain, "partly labeled": PartialLabels(plain, {})}[name]
    value, expected = loss(logits, labels.to(dtype)), loss(logits, labels)
    assert value.equal(expected)
    assert not torch.autograd.grad(value, logits)[0][:, :, 0].any()


def test_bool_labels_are_two_classes():
    logits, labels = torch.randn(1, 2, 4, 4, 4), torch.rand(1, 4, 4, 4) < 0.5
    assert DiceCE()(logits, labels).equal(DiceCE()(logits, labels.long()))


@pytest.mark.parametrize("value", [-100, -1, 4, 254, 256, 300])
def test_a_label_that_is_no_class_is_named(value):
    loss = DiceCE()
    logits, labels = make_sample()
    labels = labels.long()
    labels[1, 2, 3, 4] = value
    with pytest.raises(UsageError, match=rf"the value {value}, .* 4 classes: .* the label 255"):
        loss(logits, labels)
    with pytest.raises(UsageError, match=r"are integers, .* got torch\.float64: use labels\.long"):
        loss(logits, labels.double())


def test_minus_1_of_a_signed_byte_is_no_class():
    logits, labels = make_sample()
    labels = torch.zeros_like(labels, dtype=torch.int8)
    labels[1, 2, 3, 4] = -1
    with pytest.raises(UsageError, match="the value -1"):
        DiceCE()(logits, labels)


def test_label_254_may_be_of_a_region():
    loss = DiceCE(regions={"organ": [254]})
    logits, labels = make_sample()
    loss(logits[:, :1], labels.long().masked_fill(labels == 3, 254))
    with pytest.raises(UsageError, match="the value -1"):
        loss(logits[:, :1], labels.long() - 1)


def test_topk_is_a_share_of_the_voxels_that_are_not_ignored():
    logits = torch.randn(1, 3, 4, 10, 10, dtype=torch.float64)
    labels = torch.randint(0, 3, (1, 4, 10, 10))
    labels[:, 1:] = IGNORE_LABEL
    worst = torch.nn.functional.cross_entropy(logits[:, :, 0], labels[:, 0], reduction="none")
    expected = worst.flatten().topk(20).values.mean()
    value = DiceCE(dice=0.0, voxel_loss="topk", topk=0.2)(logits, labels)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_class_255_is_no_voxel_to_skip_where_there_are_more(dtype):
    logits, labels = torch.randn(1, 300, 2, 2, 2, requires_grad=True), torch.full((1, 2, 2, 2), 255)
    results = [
        (loss := DiceCE()(logits, labels.to(kind)), *torch.autograd.grad(loss, logits))
        for kind in (torch.int16, dtype)
    ]
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert results[0][1].any()
