"""Losses of cases that annotate some of the classes."""

import pytest
import torch
from monai.losses import DiceFocalLoss

from tests.contract.helpers.components import saved_bytes
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.loss import dice_terms
from unet3d.loss.build import AdaptedLoss
from unet3d.loss.deep_supervision import resize_labels
from unet3d.loss.overlap import DiceCE, Tversky
from unet3d.loss.partial_labels import PartialLabels
from unet3d.types import IGNORE_LABEL

UNKNOWN = {254: (2, 3), 253: (1,)}
"""The first volume annotates class 1 of 1, 2 and 3, the second 2 and 3."""


def make_sample(dtype=torch.float64):
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 5, 6, 7, dtype=dtype, requires_grad=True)
    labels = torch.stack(
        [
            torch.tensor([254, 1], dtype=torch.uint8)[torch.randint(0, 2, (5, 6, 7))],
            torch.tensor([253, 2, 3], dtype=torch.uint8)[torch.randint(0, 3, (5, 6, 7))],
        ]
    )
    labels[:, 0, 0, :3] = IGNORE_LABEL
    return logits, labels


def merge(logits, labels):
    """Return logits and labels as the loss should see them, computed voxel by voxel."""
    merged, known = logits.movedim(1, -1).flatten(0, 3).unbind(), labels.flatten().tolist()
    rows = []
    for x, label in zip(merged, known, strict=True):
        classes = UNKNOWN.get(label, ())
        x = list(x.unbind())
        x[0] = torch.stack([x[0], *(x[c] for c in classes)]).logsumexp(0)
        for c in classes:
            x[c] = torch.full_like(x[c], -1e4)
        rows.append(torch.stack(x))
    merged = torch.stack(rows).view(*labels.shape, -1).movedim(-1, 1)
    return merged, torch.where((labels == 254) | (labels == 253), 0, labels)


LOSSES = {
    "dice_ce": DiceCE(),
    "focal": DiceCE(voxel_loss="focal", class_weights=[0.5, 1, 2, 1]),
    "topk": DiceCE(voxel_loss="topk", topk=0.3),
    "tversky": Tversky(),
    "monai": AdaptedLoss(DiceFocalLoss(softmax=True)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [10, 10**6])
def test_the_background_has_the_probability_of_classes_that_are_not_annotated(
    monkeypatch, name, chunk
):
    monkeypatch.setattr(dice_terms, "CHUNK_ELEMENTS", chunk)
    loss = LOSSES[name]
    logits, labels = make_sample()
    result, expected = PartialLabels(loss, UNKNOWN)(logits, labels), loss(*merge(logits, labels))
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (result, expected)]
    tolerance = {"rtol": 1e-5, "atol": 1e-8} if name == "monai" else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(*gradients, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite(dtype):
    logits, labels = make_sample(dtype)
    loss = PartialLabels(DiceCE(), UNKNOWN)(30 * logits, labels)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_deep_supervision_merges_each_level_at_its_own_resolution():
    logits, labels = make_sample()
    coarse = torch.randn(2, 4, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    total = PartialLabels(DiceCE(), UNKNOWN)([logits, coarse], labels)
    levels = (logits, labels), (coarse, resize_labels(labels, (3, 3, 4)))
    parts = [PartialLabels(DiceCE(), UNKNOWN)(*level) for level in levels]
    torch.testing.assert_close(total, (parts[0] + parts[1] / 2) / 1.5)
    stacked = torch.stack([logits, logits], dim=1)
    torch.testing.assert_close(PartialLabels(DiceCE(), UNKNOWN)(stacked, labels), parts[0])


def test_backward_saves_logits_and_labels_alone():
    """Twice: as they are, and as the loss sees them."""
    logits, labels = make_sample(torch.float32)
    _, nbytes = saved_bytes(lambda: PartialLabels(DiceCE(), UNKNOWN)(logits, labels))
    assert 0 <= nbytes - 2 * (logits.nbytes + labels.nbytes) < 2000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss.label_smoothing=0.1"], "label_smoothing gives every class a part"),
        (["loss=monai", "+loss.sigmoid=true"], "adds up probabilities of a softmax"),
    ],
)
def test_losses_that_cannot_be_merged_are_refused(composed, tmp_path, words, message):
    settings = composed("data.annotated={*:[ball,tube,box]}", *words)
    with pytest.raises(UsageError, match=message):
        build_training(settings, tmp_path)
