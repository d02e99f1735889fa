"""Labels decided bar by bar equal those of the whole logits, resampled at once."""

import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from torch.nn.functional import interpolate

from unet3d.data.preprocessing.resampling import crop, reorient
from unet3d.errors import RunError
from unet3d.inference.accumulate import list_flips
from unet3d.inference.memory_plan import Budget, InferenceProblem, list_plans
from unet3d.inference.segment import segment
from unet3d.inference.write_labels import Output, RegionsToLabels, argmax_labels, probabilities
from unet3d.types import FileGrid

CPU = torch.device("cpu")
PATCH = (8, 10, 8)
SAME = ((20, 17, 9), (20, 17, 9))
UP = ((20, 17, 9), (33, 40, 23))
DOWN = ((20, 31, 19), (11, 13, 7))
MIXED = ((20, 17, 19), (20, 40, 7))
SMALL = ((5, 6, 7), (9, 6, 3))


def grid_of(shape, box, axes=(0, 1, 2), flips=(False, False, False), beside=(0, 0, 0)):
    """A prepared shape, and a box of a file that has `beside` voxels more before it and after."""
    file_shape = [0, 0, 0]
    for axis, n, more in zip(axes, box, beside, strict=True):
        file_shape[axis] = n + 2 * more
    return FileGrid(
        file_shape=tuple(file_shape),
        axes=axes,
        flips=flips,
        box=tuple((more, more + n) for n, more in zip(box, beside, strict=True)),
        shape=shape,
    )


def inside(array, grid):
    return crop(reorient(array, grid.axes, grid.flips), grid)


def plain(image, networks, mirrored, grid, decide):
    """The whole logits, resampled at once."""
    total = torch.zeros(())
    for network in networks:
        for flipped in mirrored:
            dims = [axis + 2 for axis in flipped]
            total = total + sliding_window_inference(
                image[None],
                PATCH,
                1,
                lambda x, n=network, d=dims: n(x.flip(d)).flip(d),
                overlap=0.5,
                mode="gaussian",
            )
    box = [stop - start for start, stop in grid.box]
    logits = interpolate(total / (len(networks) * len(mirrored)), box, mode="trilinear")
    labels = np.zeros(grid.file_shape, np.uint8)
    inside(labels, grid)[:] = decide(logits[0]).numpy()
    return labels


def every_plan(grid, classes, batch_size=1):
    job = InferenceProblem(
        shape=grid.shape,
        box=tuple(stop - start for start, stop in grid.box),
        channels=2,
        classes=classes,
        patch=PATCH,
        overlap=0.5,
        batch_size=batch_size,
        window_bytes=0,
        held=0,
    )
    budget = Budget(ram=2**40)
    return [*list_plans(job, budget, strips=False), *list_plans(job, budget, strips=True)]


def compare(
    grid, *, networks=1, classes=6, decide=argmax_labels, mirrored=((),), batch_size=1, some=1
):
    image = torch.randn(2, *grid.shape)
    members = [torch.nn.Conv3d(2, classes, 3, padding=1) for _ in range(networks)]
    with torch.no_grad():
        expected = plain(image, members, mirrored, grid, decide)
        for plan in every_plan(grid, classes, batch_size)[::some]:
            labels = np.zeros(grid.file_shape, np.uint8)
            outputs = [Output(decide, inside(labels, grid))]
            segment(image, members, plan, outputs, mirrored=mirrored, device=CPU)
            np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(("shape", "box"), [SAME, UP, DOWN, MIXED, SMALL])
def test_every_order_and_every_number_of_strips_gives_the_same_labels(shape, box):
    compare(grid_of(shape, box))


@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("flips", [(True, False, False), (False, True, True)])
def test_labels_go_back_into_a_box_of_a_turned_file(axes, flips):
    compare(grid_of(*MIXED, axes=axes, flips=flips, beside=(3, 0, 2)), some=5)


@pytest.mark.parametrize(
    "options",
    [
        {"networks": 3},
        {"mirrored": list_flips([0, 1, 2])},
        {"batch_size": 5},
        {"classes": 2},
        {"classes": 1, "decide": RegionsToLabels([3])},
        {"classes": 3, "decide": RegionsToLabels([1, 2, 4])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ensembles_mirrorings_batches_and_regions_are_decided_alike(options):
    compare(grid_of(*UP), some=7, **options)


def test_a_later_region_is_painted_over_an_earlier_one():
    logits = torch.tensor([[1.0, 1.0, -1.0, -1.0], [-1.0, 1.0, 1.0, -1.0]])[..., None]
    assert RegionsToLabels([5, 7])(logits).flatten().tolist() == [5, 7, 7, 0]


@torch.no_grad()
def test_probabilities_are_those_of_the_resampled_logits():
    grid = grid_of(*UP)
    image, network = torch.randn(2, *grid.shape), torch.nn.Conv3d(2, 3, 3, padding=1)
    logits = sliding_window_inference(image[None], PATCH, 1, network, overlap=0.5, mode="gaussian")
    expected = interpolate(logits, UP[1], mode="trilinear")[0].softmax(0).numpy()
    plan = every_plan(grid, 3)[0]
    found = np.zeros((3, *grid.file_shape), np.float32)
    segment(image, [network], plan, [Output(probabilities, found)], device=CPU)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_output_that_is_no_number_is_a_fault():
    grid = grid_of(*SAME)
    plan, labels = every_plan(grid, 2)[0], np.zeros(grid.file_shape, np.uint8)
    network = [lambda x: x / 0]
    with pytest.raises(RunError, match="NaN"):
        segment(
            torch.zeros(2, *grid.shape), network, plan, [Output(argmax_labels, labels)], device=CPU
        )
