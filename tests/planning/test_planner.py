from types import SimpleNamespace

import pytest

from unet3d.errors import DoesNotFitError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.from_config import estimate_configured_step
from unet3d.peak_memory import MemoryRecord
from unet3d.planning import experiment
from unet3d.planning.experiment import describe_step_time, explain_limits, plan_schedule
from unet3d.planning.planner import (
    TrainingPlan,
    choose_strategy,
    enlarge_tiles,
    find_ordered_axes,
)
from unet3d.planning.topology import Levels

PATCH = (128, 128, 128)
LEVELS = Levels(pool_windows=((2, 2, 2),), kernels=((3, 3, 3),) * 2)
SMALL = ["model=unet_tiny", "model.width=2", "model.convs_per_level=1"]


def make_plan(**changes):
    """Return a plan of two patches of 128 for five cases of 128, with some fields changed."""
    plan = {
        "num_cases": 5,
        "spacing_mm": (1.0, 1.0, 1.0),
        **dict.fromkeys(("median_shape", "initial_patch", "patch_size"), PATCH),
        "normalize": ["zscore"],
        "levels": LEVELS,
        "batch_size": 2,
        "strategy": {},
        "model": {"model.depth": 2, "model.pool_kernel": [[2, 2, 2]]},
        "peak": MemoryRecord(reserved=0),
    }
    return TrainingPlan(**(plan | changes))


@pytest.mark.parametrize(("overrides", "num_training"), [([], 4), (["fold=none"], 5)])
def test_a_run_of_few_cases_validates_within_its_first_hundred_steps(
    composed, overrides, num_training
):
    patches_per_case, epochs = plan_schedule(make_plan(), composed(*overrides).fold)
    assert 40 <= num_training * patches_per_case / 2 * epochs <= 100


def test_many_cases_are_validated_less_often(composed):
    plan = make_plan(num_cases=500, median_shape=(256, 256, 128))
    patches_per_case, epochs = plan_schedule(plan, composed().fold)
    num_windows = 100 * 3 * 3 * 1
    assert num_windows / (400 * patches_per_case * epochs) == pytest.approx(0.03, rel=0.2)


TINY = {"patch_size": (16,) * 3, "initial_patch": (16,) * 3, "batch_size": 32}
FEW = {"patch_size": (32,) * 3, "initial_patch": (32,) * 3, "batch_size": 16}
LARGE = {"initial_patch": (256,) * 3, "median_shape": (512,) * 3}
SET = ["data.patch_size=[8,8,8]", "data.batch_size=3"]


@pytest.mark.parametrize(
    ("overrides", "changes", "patch", "batch"),
    [
        ([], {}, "covers the median case, a larger", "2, because 3 would exceed 5% of the"),
        ([], LARGE, "limited by the budget, 256 x 256 x 256", "limited by the budget, 3 would"),
        ([], TINY, "limited to 16,777,216 voxels", "limited to 32"),
        ([], FEW, "limited to 16,777,216 voxels", "limited to 5% of the dataset's voxels"),
        (SET, {}, "set by data.patch_size", "set by data.batch_size"),
    ],
)
def test_a_plan_explains_what_limits_patch_and_batch(
    composed, small, overrides, changes, patch, batch
):
    base = [w for w in small if not w.startswith(("data.patch_size", "data.batch_size"))]
    is_overridden = composed(*overrides, base=base).composition.is_overridden
    lines = explain_limits(make_plan(**changes), is_overridden)
    assert lines[0].startswith(f"patch size: {patch}")
    assert lines[1].startswith(f"batch size: {batch}")


NOT_MEASURED = "time not measured on this machine's CPU (1 thread): "


@pytest.mark.parametrize(
    ("limit_seconds", "reserved", "start"),
    [
        (10, 0, "a step takes 0.0"),
        (0, 0, f"{NOT_MEASURED}a step may take up to "),
        (10, 2**60, f"{NOT_MEASURED}it needs 2147483648.0 GiB, "),
    ],
)
def test_a_step_is_timed_unless_it_would_take_too_long_or_does_not_fit(
    composed, monkeypatch, limit_seconds, reserved, start
):
    monkeypatch.setattr(experiment, "LIMIT_SECONDS", limit_seconds)
    plan = make_plan(patch_size=(8, 8, 8), peak=MemoryRecord(reserved=reserved))
    assert describe_step_time(composed(*SMALL).step, plan).startswith(start)


@pytest.fixture
def network(composed):
    words = ["model.width=32", "model.depth=2", "model.convs_per_level=1"]
    words += ["trainer.accelerator=auto", "data.patch_size=[32,32,32]"]
    return composed(*words).step


STRATEGIES = [{"checkpointing": name} for name in ("fused", "skips", "lean", "leanest")]


@pytest.mark.parametrize(("strategy", "batch_size", "limit"), [("fused", 1, 1), ("skips", 2, 2)])
def test_the_strategy_with_the_least_work_that_fits_a_batch_of_two_is_chosen(
    network, strategy, batch_size, limit
):
    """Or a batch of one, where that is configured."""
    planned = network.vary({"checkpointing": strategy, "data.batch_size": batch_size})
    budget = estimate_configured_step(planned).peak.reserved + CUDA_CONTEXT_BYTES
    chosen, largest, peak = choose_strategy(network, STRATEGIES, budget, limit)
    assert (chosen, largest) == ({"checkpointing": strategy}, batch_size)
    assert peak.reserved + CUDA_CONTEXT_BYTES == budget


def test_tiles_are_as_large_as_the_budget_allows(network):
    planned = network.vary({"checkpointing": "lean", "data.batch_size": 2})
    tiles = {"checkpointing.tile_mib": 256}
    peak = estimate_configured_step(planned.vary(tiles)).peak
    budget, smaller = peak.reserved + CUDA_CONTEXT_BYTES, MemoryRecord(reserved=1)
    assert enlarge_tiles(planned, smaller, budget) == (tiles, peak)
    assert enlarge_tiles(planned, smaller, budget - 1) == ({}, smaller)


def test_a_budget_that_no_strategy_fits_is_an_error_that_says_what_to_change(network):
    with pytest.raises(DoesNotFitError, match="fits a batch of 1 in the budget: raise budget_gib"):
        choose_strategy(network, STRATEGIES[:1], CUDA_CONTEXT_BYTES, 1)


@pytest.mark.parametrize(
    ("cases", "exceptions", "expected"),
    [
        (20, 1, {2: ("left", "right", 19, 20)}),
        (20, 2, {}),
        (19, 0, {}),  # could be chance
    ],
)
def test_an_axis_is_ordered_if_a_class_comes_before_another_in_nearly_every_case(
    cases, exceptions, expected
):
    classes = ("background", "right", "left", "rare")
    fingerprints = [
        SimpleNamespace(
            centers={1: (n % 2, 5, 9 - 9 * (n < exceptions)), 2: (0.5, 5, 6), 0: (5, 5, 5)}
            | ({3: (20, 20, 20)} if n < 5 else {})
        )
        for n in range(cases)
    ]
    assert find_ordered_axes(fingerprints, classes) == expected
