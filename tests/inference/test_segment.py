"""Labels written tile by tile equal those of the full logits, resampled at once."""

from functools import partial

import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from torch.nn.functional import interpolate

from unet3d.data.preprocessing.resampling import FileGrid, crop, reorient
from unet3d.errors import RunError
from unet3d.inference.accumulate import list_flips
from unet3d.inference.memory_plan import Budget, VolumeToSegment, list_plans
from unet3d.inference.window_order import WindowSchedule
from unet3d.inference.write_labels import (
    Output,
    argmax_labels,
    label_regions,
    segment,
)

CPU = torch.device("cpu")
PATCH = (8, 10, 8)
SAME = ((20, 17, 9), (20, 17, 9))
UP = ((20, 17, 9), (33, 40, 23))
DOWN = ((20, 31, 19), (11, 13, 7))
MIXED = ((20, 17, 19), (20, 40, 7))
SMALL = ((5, 6, 7), (9, 6, 3))


def make_grid(shape, box, axes=(0, 1, 2), flips=(False, False, False), margins=(0, 0, 0)):
    """Return the grid of a file with a box of voxels that is resampled to `shape`."""
    file_shape = [0, 0, 0]
    for axis, n, margin in zip(axes, box, margins, strict=True):
        file_shape[axis] = n + 2 * margin
    return FileGrid(
        file_shape=tuple(file_shape),
        axes=axes,
        flips=flips,
        box=tuple((margin, margin + n) for n, margin in zip(box, margins, strict=True)),
        shape=shape,
    )


def view_box(array, grid):
    return crop(reorient(array, grid.axes, grid.flips), grid)


def segment_at_once(image, networks, flips, grid, decide):
    """Return the labels of the full logits, resampled at once."""
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
    box = [stop - start for start, stop in grid.box]
    logits = interpolate(total / (len(networks) * len(flips)), box, mode="trilinear")
    labels = np.zeros(grid.file_shape, np.uint8)
    view_box(labels, grid)[:] = decide(logits[0]).numpy()
    return labels


def list_all_plans(grid, classes, batch_size=1):
    volume = VolumeToSegment(
        schedule=WindowSchedule(size=grid.shape, patch=PATCH, overlap=0.5, batch_size=batch_size),
        box=tuple(stop - start for start, stop in grid.box),
        channels=2,
        classes=classes,
        window_bytes=0,
        held_bytes=0,
    )
    budget = Budget(ram_bytes=2**40)
    return [*list_plans(volume, budget, split=False), *list_plans(volume, budget, split=True)]


def check_plans(
    grid, *, networks=1, classes=6, decide=argmax_labels, flips=((),), batch_size=1, step=1
):
    """Compare the labels of every `step`-th plan with those of the full logits."""
    image = torch.randn(2, *grid.shape)
    members = [torch.nn.Conv3d(2, classes, 3, padding=1) for _ in range(networks)]
    with torch.no_grad():
        expected = segment_at_once(image, members, flips, grid, decide)
        for plan in list_all_plans(grid, classes, batch_size)[::step]:
            labels = np.zeros(grid.file_shape, np.uint8)
            outputs = [Output(decide, view_box(labels, grid))]
            segment(image, members, plan, outputs, flips=flips, device=CPU)
            np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(("shape", "box"), [SAME, UP, DOWN, MIXED, SMALL])
def test_every_axis_order_and_number_of_slabs_gives_the_same_labels(shape, box):
    check_plans(make_grid(shape, box))


@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("flips", [(True, False, False), (False, True, True)])
def test_labels_are_written_into_a_box_of_a_reoriented_file(axes, flips):
    check_plans(make_grid(*MIXED, axes=axes, flips=flips, margins=(3, 0, 2)), step=5)


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
    check_plans(make_grid(*UP), step=7, **options)


@torch.no_grad()
def test_probabilities_are_those_of_the_resampled_logits():
    grid = make_grid(*UP)
    image, network = torch.randn(2, *grid.shape), torch.nn.Conv3d(2, 3, 3, padding=1)
    logits = sliding_window_inference(image[None], PATCH, 1, network, overlap=0.5, mode="gaussian")
    expected = interpolate(logits, UP[1], mode="trilinear")[0].softmax(0).numpy()
    plan = list_all_plans(grid, 3)[0]
    output = np.zeros((3, *grid.file_shape), np.float32)
    segment(image, [network], plan, [Output(partial(torch.softmax, dim=0), output)], device=CPU)
    np.testing.assert_allclose(output, expected, atol=1e-6)


def test_nan_logits_are_an_error():
    grid = make_grid(*SAME)
    plan, labels = list_all_plans(grid, 2)[0], np.zeros(grid.file_shape, np.uint8)
    networks = [lambda x: x / 0]
    with pytest.raises(RunError, match="NaN"):
        segment(
            torch.zeros(2, *grid.shape), networks, plan, [Output(argmax_labels, labels)], device=CPU
        )
