import random
from itertools import pairwise, permutations, product, takewhile
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflows.planning.helpers.nnunet_planner import (
    plan_levels_with_nnunet,
    plan_with_nnunet,
)
from unet3d.model.unet import UNet3D
from unet3d.workflows.planning.planner import limit_batch
from unet3d.workflows.planning.topology import (
    find_median_shape,
    initial_patch,
    list_patches,
    plan_levels,
    round_up_to_multiple,
    target_spacing,
)

SPACING = st.tuples(*[st.floats(0.3, 8)] * 3)
SIZE = st.tuples(*[st.integers(4, 400)] * 3)
CARDIAC = (1.5, 1.5, 10), (216, 256, 10)


def draw_spacing(drawn):
    """Like those of MR and CT: often with a coarse axis, and with ties as often."""
    if drawn.random() < 0.3:
        return tuple(drawn.choice([0.5, 0.7, 1, 1.4, 2, 3, 5]) for _ in range(3))
    fine = [drawn.uniform(0.3, 3) for _ in range(3)]
    fine[drawn.randrange(3)] *= drawn.choice([1, 1, 2, 4, 8])
    return tuple(fine)


def draw_cases(drawn):
    """Spacings and sizes of a data set, scattered around those of a case; often a thin axis."""
    spacing = draw_spacing(drawn)
    thin = drawn.choice([spacing.index(max(spacing)), drawn.randrange(3)])
    size = [drawn.randint(8, 40) if axis == thin else drawn.randint(16, 500) for axis in range(3)]
    cases = drawn.randint(1, 9)
    spacings = [[s * drawn.uniform(0.5, 1.5) for s in spacing] for _ in range(cases)]
    shapes = [[max(4, round(n * drawn.uniform(0.7, 1.4))) for n in size] for _ in range(cases)]
    return spacings, shapes


def test_levels_and_the_padded_patch_are_nnunets():
    drawn = random.Random(0)
    for _ in range(200):
        spacing = draw_spacing(drawn)
        patch = [drawn.choice([drawn.randint(1, 40), drawn.randint(4, 400)]) for _ in range(3)]
        ours = plan_levels(spacing, patch)
        assert (ours, round_up_to_multiple(patch, ours.factor)) == plan_levels_with_nnunet(
            spacing, patch
        )


def test_levels_are_nnunets_where_spacings_tie_at_twice_the_finest_and_sizes_at_the_limits():
    for spacing, patch in product(product([1, 2, 4], repeat=3), product([7, 8, 12, 15], repeat=3)):
        ours = plan_levels(spacing, patch)
        assert (ours, round_up_to_multiple(patch, ours.factor)) == plan_levels_with_nnunet(
            spacing, patch
        )


def test_an_axis_that_is_convolved_once_is_at_every_coarser_level():
    assert plan_levels((1, 1, 1), (64, 64, 8)).windows[1:] == ((2, 2, 1),) * 3
    assert plan_levels((1, 1, 1), (64, 64, 8)).kernels == ((3, 3, 3),) * 5


def test_the_coarsest_level_convolves_along_all_axes():
    assert plan_levels(*CARDIAC).kernels == ((3, 3, 1), (3, 3, 1), *[(3, 3, 3)] * 4)


@pytest.mark.parametrize(
    ("size", "windows"), [(11, ()), (12, ((1, 1, 2),)), (24, ((1, 1, 2), (1, 1, 2)))]
)
def test_an_axis_is_pooled_alone_from_12_voxels_on(size, windows):
    assert plan_levels((1, 1, 1), (7, 7, size)).windows == windows


def test_spacing_median_first_patch_and_batch_are_nnunets():
    drawn = random.Random(0)
    compared = coarse = 0
    for _ in range(200):
        spacings, shapes = draw_cases(drawn)
        theirs = plan_with_nnunet(spacings, shapes, estimate=lambda patch: 1)
        spacing = target_spacing(spacings, shapes)
        assert spacing == pytest.approx(theirs.spacing_mm, rel=1e-6)
        assert find_median_shape(spacings, shapes, theirs.spacing_mm) == theirs.median
        first = initial_patch(theirs.spacing_mm, theirs.median)
        shape = plan_levels(theirs.spacing_mm, first)
        patch = round_up_to_multiple(first, shape.factor)
        if not {7.5, 11.5} & set(theirs.median):  # these have a test of their own
            assert (patch, shape) == (theirs.patch, theirs.levels)
            compared += 1
        assert plan_levels(theirs.spacing_mm, patch) == shape
        assert limit_batch(theirs.patch, theirs.median, len(shapes)) == min(32, theirs.batch)
        coarse += max(spacing) < 0.9 * max(target_spacing(spacings, [(9, 9, 9)] * len(shapes)))
    assert compared > 190
    assert coarse > 5  # data sets whose coarse axis gets a finer spacing than its median


def test_a_median_of_seven_and_a_half_voxels_counts_as_eight_which_can_be_pooled():
    spacings, shapes = [(1, 1, 1)] * 2, [(7, 64, 64), (8, 64, 64)]
    theirs = plan_with_nnunet(spacings, shapes, estimate=lambda patch: 1)
    assert theirs.patch == initial_patch((1, 1, 1), theirs.median) == (8, 64, 64)
    assert theirs.levels.windows[0] == (1, 2, 2)
    assert plan_levels((1, 1, 1), theirs.patch).windows[0] == (2, 2, 2)


def test_the_spacing_of_a_coarse_axis_is_nnunets_where_it_ties_with_the_others():
    shapes = [(256, 256, 20)] * 10
    for low in (0.9, 1, 1 + 1e-6, 1.1):
        spacings = [(1, 1, low)] * 2 + [(1, 1, 5)] * 8
        theirs = plan_with_nnunet(spacings, shapes, estimate=lambda patch: 1).spacing_mm
        assert target_spacing(spacings, shapes) == pytest.approx(theirs, abs=1e-9)


def test_the_next_smaller_patch_is_nnunets_until_an_axis_has_four_voxels():
    drawn = random.Random(0)
    compared = 0
    for _ in range(30):
        spacings, shapes = draw_cases(drawn)
        theirs = plan_with_nnunet(spacings, shapes, estimate=fit_below(10 ** drawn.uniform(4.5, 7)))
        tried = list(takewhile(lambda patch: min(patch) >= 4, theirs.patches))
        kept = [p for n, p in enumerate(tried) if is_kept(p, theirs, tried[:n])]
        assert list_patches(theirs.spacing_mm, theirs.median)[: len(kept)] == kept
        compared += len(kept)
    assert compared > 150


def is_kept(patch, plan, before):
    """Whether ours tries it too: it has levels, and it is smaller than all before."""
    smaller = all(prod(patch) < prod(p) for p in before if plan_levels(plan.spacing_mm, p).windows)
    return smaller and bool(plan_levels(plan.spacing_mm, patch).windows)


def fit_below(voxels):
    return lambda patch: 1 if prod(patch) <= voxels else 1e12


@pytest.mark.parametrize("spacing", sorted(set(permutations((1, 1, 3))) | {(1, 1, 1)}))
def test_of_axes_that_are_equally_large_for_the_cases_nnunets_is_the_first_to_shrink(spacing):
    theirs = plan_with_nnunet([spacing], [(64, 64, 64)], estimate=fit_below(40**3))
    assert len(theirs.patches) > 3
    assert list_patches(spacing, (64, 64, 64))[: len(theirs.patches)] == list(theirs.patches)


def test_the_hippocampus_gets_nnunets_patch_and_pooling():
    patch = initial_patch((1, 1, 1), (36, 50, 35))
    shape = plan_levels((1, 1, 1), patch)
    assert round_up_to_multiple(patch, shape.factor) == (40, 56, 40)
    assert shape.windows == ((2, 2, 2),) * 3
    assert shape.kernels == ((3, 3, 3),) * 4


def test_the_spacing_is_the_median_but_a_fine_one_along_a_coarse_and_thin_axis():
    assert target_spacing([(1, 1, 2), (1, 1, 3), (2, 1, 4)], [(64, 64, 40)] * 3) == (1, 1, 3)
    thin = target_spacing([(1, 1, 4), (1, 1, 6), (1, 1, 8)], [(256, 256, 20)] * 3)
    assert thin == pytest.approx((1, 1, 4.4))


def test_a_spacing_is_written_with_the_digits_that_a_file_has():
    assert target_spacing([(1.2000000477, 0.00025, 70.1)], [(9, 9, 9)]) == (1.2, 0.00025, 70.1)


@settings(max_examples=40)
@given(SPACING, SIZE)
def test_every_level_keeps_four_voxels_and_patches_divide(spacing, size):
    patches = list_patches(spacing, size)
    for patch in patches:
        factor = plan_levels(spacing, patch).factor
        assert all(n % f == 0 for n, f in zip(patch, factor, strict=True))
        assert all(n // f >= 4 or f == 1 for n, f in zip(patch, factor, strict=True))
    assert all(prod(less) < prod(patch) for patch, less in pairwise(patches))


def test_a_network_is_built_and_trained_with_the_planned_levels():
    shape = plan_levels(*CARDIAC)
    net = UNet3D(
        in_channels=1,
        num_classes=2,
        depth=len(shape.kernels),
        width=2,
        convs_per_level=1,
        pool_kernel=shape.windows,
        kernel_size=shape.kernels,
        norm="instance",
        upsampling="transposed",
        pool=torch.nn.MaxPool3d,
    )
    logits = net(torch.randn(1, 1, 64, 64, 10))
    assert logits.shape[2:] == (64, 64, 10)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
