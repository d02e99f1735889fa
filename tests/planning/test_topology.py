import random
from itertools import permutations, product, takewhile
from math import prod

import pytest

from scripts.bench.nnunet_planner import plan_levels_with_nnunet, plan_with_nnunet
from unet3d.planning.planner import compute_max_batch_size
from unet3d.planning.topology import (
    choose_initial_patch,
    choose_target_spacing,
    find_median_shape,
    list_patches,
    plan_levels,
    round_up_to_multiple,
)


def draw_spacing(rng):
    """Draw a spacing like those of MR and CT: often with a coarse axis, often with ties."""
    if rng.random() < 0.3:
        return tuple(rng.choice([0.5, 0.7, 1, 1.4, 2, 3, 5]) for _ in range(3))
    fine = [rng.uniform(0.3, 3) for _ in range(3)]
    fine[rng.randrange(3)] *= rng.choice([1, 1, 2, 4, 8])
    return tuple(fine)


def draw_cases(rng):
    """Draw spacings and sizes of similar cases, often with a thin axis."""
    spacing = draw_spacing(rng)
    thin = rng.choice([spacing.index(max(spacing)), rng.randrange(3)])
    size = [rng.randint(8, 40) if axis == thin else rng.randint(16, 500) for axis in range(3)]
    num_cases = rng.randint(1, 9)
    spacings = [[s * rng.uniform(0.5, 1.5) for s in spacing] for _ in range(num_cases)]
    shapes = [[max(4, round(n * rng.uniform(0.7, 1.4))) for n in size] for _ in range(num_cases)]
    return spacings, shapes


def test_levels_equal_nnunets_where_spacings_and_sizes_are_at_the_limits():
    spacings, patches = product([1, 2, 4], repeat=3), product([7, 8, 11, 12, 24], repeat=3)
    for spacing, patch in product(spacings, patches):
        ours = plan_levels(spacing, patch)
        padded = round_up_to_multiple(patch, ours.factor)
        assert (ours, padded) == plan_levels_with_nnunet(spacing, patch)


@pytest.mark.slow
def test_spacing_median_initial_patch_and_batch_equal_nnunets():
    rng = random.Random(0)
    compared = coarse = 0
    for _ in range(200):
        spacings, shapes = draw_cases(rng)
        theirs = plan_with_nnunet(spacings, shapes, estimate=lambda patch: 1)
        spacing = choose_target_spacing(spacings, shapes)
        assert spacing == pytest.approx(theirs.spacing_mm, rel=1e-6)
        assert find_median_shape(spacings, shapes, theirs.spacing_mm) == theirs.median
        first = choose_initial_patch(theirs.spacing_mm, theirs.median)
        levels = plan_levels(theirs.spacing_mm, first)
        patch = round_up_to_multiple(first, levels.factor)
        if not {7.5, 11.5} & set(theirs.median):  # see the next test
            assert (patch, levels) == (theirs.patch, theirs.levels)
            compared += 1
        assert plan_levels(theirs.spacing_mm, patch) == levels
        assert compute_max_batch_size(theirs.patch, theirs.median, len(shapes)) == min(
            32, theirs.batch
        )
        coarse += max(spacing) < 0.9 * max(
            choose_target_spacing(spacings, [(9, 9, 9)] * len(shapes))
        )
    assert compared > 190
    assert coarse > 5  # datasets whose coarse axis gets a finer spacing than its median


def test_a_median_of_seven_and_a_half_voxels_is_rounded_up_and_pooled():
    spacings, shapes = [(1, 1, 1)] * 2, [(7, 64, 64), (8, 64, 64)]
    theirs = plan_with_nnunet(spacings, shapes, estimate=lambda patch: 1)
    assert theirs.patch == choose_initial_patch((1, 1, 1), theirs.median) == (8, 64, 64)
    assert theirs.levels.pool_windows[0] == (1, 2, 2)
    assert plan_levels((1, 1, 1), theirs.patch).pool_windows[0] == (2, 2, 2)


@pytest.mark.slow
def test_smaller_patches_equal_nnunets_until_an_axis_has_four_voxels():
    rng = random.Random(0)
    compared = 0
    for _ in range(30):
        spacings, shapes = draw_cases(rng)
        theirs = plan_with_nnunet(spacings, shapes, estimate=fits_below(10 ** rng.uniform(4.5, 7)))
        tried = list(takewhile(lambda patch: min(patch) >= 4, theirs.patches))
        listed = [p for n, p in enumerate(tried) if is_listed(p, theirs, tried[:n])]
        assert list_patches(theirs.spacing_mm, theirs.median)[: len(listed)] == listed
        compared += len(listed)
    assert compared > 150


def is_listed(patch, plan, before):
    """Return whether our planner tries a patch, too: it has levels and is smaller than before."""
    smaller = all(
        prod(patch) < prod(p) for p in before if plan_levels(plan.spacing_mm, p).pool_windows
    )
    return smaller and bool(plan_levels(plan.spacing_mm, patch).pool_windows)


def fits_below(voxels):
    """Return an estimate for nnU-Net's planner: patches of at most `voxels` voxels fit."""
    return lambda patch: 1 if prod(patch) <= voxels else 1e12


def test_a_coarse_axis_stays_coarser_than_the_others():
    spacings, shapes = 2 * [(0.5, 1, 1)] + 3 * [(5, 1, 1)], 5 * [(9, 64, 64)]
    theirs = plan_with_nnunet(spacings, shapes, estimate=lambda patch: 1)
    assert choose_target_spacing(spacings, shapes) == theirs.spacing_mm == (1.00001, 1, 1)


def test_a_spacing_has_no_more_digits_than_a_file():
    chosen = choose_target_spacing([(1.2000000477, 0.00025, 70.1)], [(9, 9, 9)])
    assert chosen == (1.2, 0.00025, 70.1)


@pytest.mark.parametrize("spacing", sorted(set(permutations((1, 1, 3))) | {(1, 1, 1)}))
def test_the_first_axis_to_shrink_equals_nnunets_on_a_tie(spacing):
    theirs = plan_with_nnunet([spacing], [(64, 64, 64)], estimate=fits_below(40**3))
    assert len(theirs.patches) > 3
    assert list_patches(spacing, (64, 64, 64))[: len(theirs.patches)] == list(theirs.patches)
