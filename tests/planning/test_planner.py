import json
import re
from math import prod
from time import sleep, thread_time
from types import SimpleNamespace

import pytest

from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.estimate import add_context_bytes
from unet3d.memory.fit import estimate_configured_step
from unet3d.peak_memory import MemoryRecord
from unet3d.planning import planner, step_time
from unet3d.planning.experiment import (
    LONG_STEPS,
    describe_long_recipe,
    plan_schedule,
)
from unet3d.planning.planner import (
    TrainingPlan,
    choose_resolution,
    choose_strategy,
    find_ordered_axes,
    inspect_dataset,
)
from unet3d.planning.step_time import StepTime, describe_step_time, plan_within_time
from unet3d.planning.topology import Levels, list_patches

PATCH = (128, 128, 128)
LEVELS = Levels(pool_windows=((2, 2, 2),), kernels=((3, 3, 3),) * 2)
SMALL = ["model=unet_tiny", "model.width=2", "model.convs_per_level=1"]


def make_plan(**changes):
    """Return a plan of two patches of 128 for five cases of 128, with some fields changed."""
    plan = {
        "num_cases": 5,
        "num_training": 4,
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


@pytest.mark.parametrize("num_training", [2, 4, 5])
def test_a_run_of_few_cases_validates_within_its_first_hundred_steps(num_training):
    patches_per_case, epochs = plan_schedule(make_plan(num_training=num_training), steps=1000)
    assert 40 <= num_training * patches_per_case / 2 * epochs <= 100


def test_many_cases_are_validated_less_often():
    plan = make_plan(num_cases=500, num_training=400, median_shape=(256, 256, 128))
    patches_per_case, epochs = plan_schedule(plan, LONG_STEPS)
    num_windows = 100 * 3 * 3 * 1
    assert num_windows / (400 * patches_per_case * epochs) == pytest.approx(0.03, rel=0.2)


def test_a_run_validates_several_times_however_many_windows_its_volumes_have():
    sizes = {"num_cases": 500, "num_training": 400}
    plan = make_plan(**sizes, median_shape=(512, 512, 512), patch_size=(8, 8, 8))
    patches_per_case, epochs = plan_schedule(plan, steps=1000)
    assert 4 <= 1000 / (400 * patches_per_case / 2 * epochs) <= 6


NOT_MEASURED = "time not measured on this machine: "


@pytest.mark.parametrize(
    ("limit_seconds", "reserved", "start"),
    [
        (10, 0, "a step takes 0.0"),
        (0, 0, "a step may take up to "),
        (10, 2**60, f"{NOT_MEASURED}it needs 2147483648.0 GiB, "),
    ],
)
def test_a_step_is_timed_unless_it_would_take_too_long_or_does_not_fit(
    composed, monkeypatch, limit_seconds, reserved, start
):
    monkeypatch.setattr(step_time, "LIMIT_SECONDS", limit_seconds)
    plan = make_plan(patch_size=(8, 8, 8), peak=MemoryRecord(reserved=reserved))
    assert describe_step_time(composed(*SMALL).step, plan, 100).startswith(start)


@pytest.mark.slow
def test_a_plan_warns_where_validation_of_the_largest_case_needs_more_than_its_budget(composed):
    """64 channels of a case take more than a step of two patches."""
    step = composed(*SMALL, "data.in_channels=64", "trainer.accelerator=cpu").step
    plan = make_plan(patch_size=(16, 16, 16))
    sizes = {"data.patch_size": plan.patch_size, "data.batch_size": 2, **plan.model}
    budget = add_context_bytes(estimate_configured_step(step.vary(sizes)).run_peak) + 2**20

    def check(*shapes):
        cases = [SimpleNamespace(shape=shape, spacing_mm=(1, 1, 1)) for shape in shapes]
        dataset = SimpleNamespace(fingerprints=cases)
        return planner.check_largest_case(step, dataset, plan, budget)

    (line,) = check((16, 16, 16), (16, 64, 64))
    assert line.startswith("validation of the largest case, 16 x 64 x 64 voxels, is estimated to ")
    assert check((16, 16, 16), (16, 20, 20)) == check((16, 16, 16)) == []
    assert check((512, 512, 512)) == []  # not followed


@pytest.fixture
def plan_for(composed, monkeypatch):
    """Plan for a training time on a machine where a step takes a second per million channels of a
    voxel; return spacing, width, and the number of steps that fit."""

    def measure(config, plan, device):
        width = config.network.model.arguments["width"]
        seconds = plan.batch_size * prod(plan.patch_size) * width / 1e6
        return StepTime(seconds=seconds, is_measured=True, device="it")

    def make_largest_patch(config, dataset, budget, is_overridden, max_batch_size):
        _, median = choose_resolution(config.data, dataset)
        spacing, patch = config.data.spacing_mm, config.data.patch_size
        if not is_overridden("data.patch_size"):
            patch = list_patches(spacing, median)[0]
        return make_plan(spacing_mm=spacing, patch_size=patch, batch_size=max_batch_size, model={})

    monkeypatch.setattr(step_time, "make_plan", make_largest_patch)
    monkeypatch.setattr(step_time, "measure_step_time", measure)
    dataset = SimpleNamespace(
        fingerprints=[SimpleNamespace(shape=(8, 64, 64), spacing_mm=(4, 1, 1), crop_fraction=1.0)],
        channels=("mri",),
    )

    def plan_for(seconds, *words):
        settings = composed(*words, "trainer.accelerator=cpu", base=["model=unet_nnunet"])
        is_overridden = settings.composition.is_overridden
        plan, time = plan_within_time(settings.step, dataset, 2**34, is_overridden, seconds)
        return plan.spacing_mm, plan.model.get("model.width"), time.count_steps(seconds)

    return plan_for


@pytest.mark.parametrize(
    ("seconds", "spacing", "width", "steps"),
    [
        (3000, (4, 1, 1), 32, 1287),  # as without a time
        (1200, (4, 1, 1), 16, 1029),  # narrower before coarser
        (600, (4, 1, 1), 8, 1029),
        (400, (4, 1.59, 1.59), 8, 1757),  # fine axes become coarser first
        (100, (5.04, 2.52, 2.52), 8, 1195),
        (30, (5.04, 2.52, 2.52), 8, 358),  # too few steps anyhow: 24 voxels remain
    ],
)
def test_a_plan_for_a_time_is_narrower_before_it_is_coarser(
    plan_for, seconds, spacing, width, steps
):
    assert plan_for(seconds) == (spacing, width, steps)


def test_a_plan_for_a_time_keeps_what_the_command_line_sets(plan_for):
    assert plan_for(200, "model.width=32", "data.spacing_mm=[4,1,1]")[:2] == ((4, 1, 1), None)
    assert plan_for(20, "data.patch_size=[16,32,32]")[0] == (4, 1, 1)


def test_a_plan_of_fewer_than_50_steps_is_refused_with_a_time_that_suffices(plan_for):
    with pytest.raises(UsageError, match=r"about 11 steps fit .* max_time=\S+ has .* at least 50$"):
        plan_for(1)


def test_a_busy_machine_does_not_make_steps_slower_but_is_named(composed, monkeypatch):
    """Another process takes three quarters of the time."""

    def compute_and_wait(step, device):
        end = thread_time() + 0.01
        while thread_time() < end:
            pass
        sleep(0.03)
        return 0.04, 0.04

    monkeypatch.setattr(step_time, "time_step", compute_and_wait)
    line = describe_step_time(composed(*SMALL).step, make_plan(patch_size=(8, 8, 8)), 100)
    assert re.match(r"a step takes 0.01\d* s on this machine's CPU \(0.04 s now, because", line)


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, {"data.foreground_fraction": 0.5, "loss.batch_dice": False}),
        (
            {"batch_size": 9, "median_shape": (256, 256, 256)},
            {"data.foreground_fraction": 1 / 3, "loss.batch_dice": True},
        ),
    ],
)
def test_the_long_recipe_samples_foreground_and_averages_dice_as_nnunet_does(changes, recipe):
    described = describe_long_recipe(make_plan(**changes))
    assert described.pop("evaluation.tta")
    assert described == pytest.approx(recipe)


def test_the_long_recipe_turns_thin_patches_in_plane_by_any_angle():
    thin = describe_long_recipe(make_plan(patch_size=(16, 64, 64)))
    assert thin["augmentation.rotation_degrees"] == [180, 180, 180]


@pytest.fixture
def network(composed):
    words = ["model.width=32", "model.depth=2", "model.convs_per_level=1"]
    words += ["trainer.accelerator=auto", "data.patch_size=[32,32,32]"]
    return composed(*words).step


STRATEGIES = [{"checkpointing": name} for name in ("fused", "skips", "lean", "leanest")]


@pytest.mark.parametrize(
    ("strategy", "batch_size", "batches"),
    [("fused", 1, range(1, 2)), ("skips", 2, range(2, 3)), ("lean", 6, range(6, 7))],
)
def test_the_strategy_with_the_least_work_that_fits_the_smallest_batch_is_chosen(
    network, strategy, batch_size, batches
):
    """The configured batch is the only one, also where less work would fit some of it."""
    planned = network.vary({"checkpointing": strategy, "data.batch_size": batch_size})
    budget = add_context_bytes(estimate_configured_step(planned).run_peak)
    chosen, largest, peak = choose_strategy(network, STRATEGIES, budget, batches)
    assert (chosen, largest) == ({"checkpointing": strategy}, batch_size)
    assert add_context_bytes(peak) == budget


def test_a_budget_that_no_strategy_fits_is_an_error_that_says_what_to_change(network):
    with pytest.raises(DoesNotFitError, match="fits a batch of 1 in the budget: raise budget_gib"):
        choose_strategy(network, STRATEGIES[:1], CUDA_CONTEXT_BYTES, range(1, 2))


@pytest.mark.parametrize(
    ("cases", "exceptions", "expected"),
    [
        (20, 1, {2: ("left", "right")}),
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


@pytest.mark.parametrize(("fold", "num_training"), [(0, 1), (1, 4), (None, 5)])
def test_cases_that_a_file_of_folds_holds_out_are_not_counted(
    composed, decathlon_folder, tmp_path, fold, num_training
):
    names = sorted(p.name.partition(".")[0] for p in (decathlon_folder / "labelsTr").iterdir())
    folds = [{"train": names[:1], "val": names[1:4]}, {"train": names[1:], "val": names[:1]}]
    (tmp_path / "splits.json").write_text(json.dumps(folds))
    words = [f"data.root={decathlon_folder}", f"data.splits={tmp_path / 'splits.json'}"]
    data = composed("data=decathlon", *words, base=[f"data.cache={tmp_path / 'cache'}"]).data
    assert inspect_dataset(data, fold, lambda key: False).num_training == num_training
