"""Labels written tile by tile equal those of the full logits, resampled at once."""

from functools import partial

import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from torch.nn.functional import interpolate

from unet3d.errors import RunError
from unet3d.inference.accumulate import list_flips
from unet3d.inference.memory_plan import Budget, VolumeToSegment, list_plans
from unet3d.inference.window_order import WindowSchedule
from unet3d.inference.write_labels import Output, argmax_labels, label_regions, segment

CPU = torch.device("cpu")
PATCH = (8, 10, 8)
SAME = ((20, 17, 9), (20, 17, 9))
UP = ((20, 17, 9), (33, 40, 23))
DOWN = ((20, 31, 19), (11, 13, 7))
MIXED = ((20, 17, 19), (20, 40, 7))
SMALL = ((5, 6, 7), (9, 6, 3))


def resample_at_once(image, networks, flips, box):
    """Return the full logits (K, D, H, W), resampled at once."""
    total = torch.zeros(())
    for network in networks:
        for axes in flips:
            dims = [axis + 2 for axis in axes]
            total = total + sliding_window_inference(
                image[None],
                PATCH,
                1,
                lambda x, n=network, d=dims: n(x.flip(d)).flip(d),
                overlap=0.5,
                mode="gaussian",
            )
    return interpolate(total / (len(networks) * len(flips)), box, mode="trilinear")[0]


def list_all_plans(shape, box, classes, batch_size=1):
    volume = VolumeToSegment(
        schedule=WindowSchedule(size=shape, patch=PATCH, overlap=0.5, batch_size=batch_size),
        box=box,
        channels=2,
        classes=classes,
        window_bytes=0,
        held_bytes=0,
    )
    budget = Budget(ram_bytes=2**40)
    return [*list_plans(volume, budget, split=False), *list_plans(volume, budget, split=True)]


@torch.no_grad()
def check_plans(
    shape, box, *, networks=1, classes=6, decide=argmax_labels, flips=((),), batch_size=1, step=1
):
    """Compare the labels of every `step`-th plan with those of the full logits."""
    image = torch.randn(2, *shape)
    members = [torch.nn.Conv3d(2, classes, 3, padding=1) for _ in range(networks)]
    expected = decide(resample_at_once(image, members, flips, box)).numpy()
    for plan in list_all_plans(shape, box, classes, batch_size)[::step]:
        labels = np.zeros(box[::-1], np.uint8).T[::-1]  # files have other orders and directions
        segment(image, members, plan, [Output(decide, labels)], flips=flips, device=CPU)
        np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(("shape", "box"), [SAME, UP, DOWN, MIXED, SMALL])
def test_every_axis_order_and_number_of_slabs_gives_the_same_labels(shape, box):
    check_plans(shape, box)


@pytest.mark.parametrize(
    "options",
    [
        {"networks": 3},
        {"flips": list_flips([0, 1, 2])},
        {"batch_size": 5},
        {"classes": 2},
        {"classes": 1, "decide": partial(label_regions, labels=[3])},
        {"classes": 3, "decide": partial(label_regions, labels=[1, 2, 4])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ensembles_flips_batches_and_regions_give_the_same_labels(options):
    check_plans(*UP, step=7, **options)


def test_nan_logits_are_an_error():
    outputs = [Output(argmax_labels, np.zeros(SAME[1], np.uint8))]
    plan = list_all_plans(*SAME, 2)[0]
    with pytest.raises(RunError, match="NaN"):
        segment(torch.zeros(2, *SAME[0]), [lambda x: x / 0], plan, outputs, device=CPU)
