"""Pure half precision makes half the default dtype of a step; positions and sums do not follow."""

import pytest
import torch

from unet3d.data.augmentation.transforms import (
    SpatialTransform,
    apply_transform,
    make_affine_matrix,
)
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.loss.deep_supervision import resize_labels


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def half_default(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_labels_are_resized_by_exact_positions(half_default):
    labels = torch.arange(640)[None, :, None, None]
    for size in (320, 384):
        small = resize_labels(labels, (size, 1, 1)).flatten()
        assert small.tolist() == [(2 * n + 1) * 640 // (2 * size) for n in range(size)]


def test_windows_are_summed_in_float32(half_default):
    dtypes = []

    def decide(logits):
        dtypes.append(logits.dtype)
        return logits.argmax(0).to(torch.uint8)

    window = SlidingWindow([8, 8, 8], decide=decide)
    window(torch.zeros(1, 1, 20, 20, 20), lambda batch: batch.expand(-1, 2, -1, -1, -1))
    assert set(dtypes) == {torch.float32}


def test_augmentation_is_the_same(half_default):
    image = torch.randn(1, 40, 40, 40, dtype=torch.float32)
    label = torch.randint(0, 3, (40, 40, 40)).to(torch.uint8)
    matrix = make_affine_matrix([0.3, 0.2, 0.1], 1.1, [24, 24, 24])
    transform = SpatialTransform(matrix=matrix, displacement=2.0, grid_spacing=8, seed=3)
    halved = apply_transform(image, label, transform, [24, 24, 24])
    torch.set_default_dtype(torch.float32)
    expected = apply_transform(image, label, transform, [24, 24, 24])
    assert all(a.equal(b) for a, b in zip(halved, expected, strict=True))
