import re

import pytest

from unet3d.memory.record import MemoryRecord
from unet3d.workflows.planning.planner import TrainingPlan, explain_limits, plan_schedule
from unet3d.workflows.planning.step_time import measure_step_time
from unet3d.workflows.planning.topology import Levels

SMALL = ["model=unet_tiny", "model.width=2", "model.convs_per_level=1"]


def planned(**others):
    """A plan of two patches of 128 for five cases of 128."""
    values = {"cases": 5, "channels": ("MRI",), "spacing_mm": (1.0, 1.0, 1.0)}
    values |= {"median": (128,) * 3, "first": (128,) * 3, "patch": (128,) * 3, "batch": 2}
    values |= {"levels": Levels(windows=((2, 2, 2),), kernels=((3, 3, 3),) * 2)}
    values |= {"normalize": ["zscore"], "strategy": (), "peak": MemoryRecord(reserved=0)}
    return TrainingPlan(**(values | others))


@pytest.mark.parametrize(("words", "training"), [([], 4), (["fold=none"], 5)])
def test_a_run_of_few_cases_validates_within_its_first_hundred_steps(composed, words, training):
    patches, epochs = plan_schedule(composed(*words), planned())
    assert 40 <= training * patches / 2 * epochs <= 100


def test_many_cases_are_validated_less_often(composed):
    patches, epochs = plan_schedule(composed(), planned(cases=500, median=(256, 256, 128)))
    windows = 100 * 3 * 3 * 1
    assert windows / (400 * patches * epochs) == pytest.approx(0.03, rel=0.2)


@pytest.mark.parametrize(
    ("words", "plan", "said"),
    [
        (
            [],
            {},
            ["the patch covers the median case", "the batch is 2: one more would be over 5 %"],
        ),
        ([], {"first": (256,) * 3}, ["limited by the budget: 256 x 256 x 256 would not fit"]),
        ([], {"median": (512,) * 3}, ["the 16,777,216 voxels at most"]),
        ([], {"patch": (16,) * 3, "first": (16,) * 3}, ["limited by the budget: 3 patches"]),
        ([], {"patch": (16,) * 3, "first": (16,) * 3, "batch": 32}, ["the batch is at most 32"]),
        ([], {"patch": (32,) * 3, "first": (32,) * 3, "batch": 16}, ["limited to 5 % of the data"]),
        (
            ["data.patch_size=[8,8,8]", "data.batch_size=3"],
            {},
            ["the patch is the one", "batch is"],
        ),
    ],
)
def test_a_plan_says_what_limits_patch_and_batch(composed, small, words, plan, said):
    left_open = [w for w in small if not w.startswith(("data.patch_size", "data.batch_size"))]
    request = composed(*words, base=left_open)
    found = " ".join(explain_limits(request, planned(**plan)))
    assert all(part in found for part in said)


def test_the_time_of_a_step_is_measured_on_random_patches(composed):
    found = measure_step_time(composed(*SMALL), planned(patch=(8, 8, 8)))
    assert found.seconds is not None
    assert 0 < found.seconds < 10
    assert found.device == "this machine's CPU (1 thread)"


def test_a_step_that_would_take_too_long_is_not_measured(composed, monkeypatch):
    monkeypatch.setattr("unet3d.workflows.planning.step_time.LIMIT_SECONDS", 0)
    found = measure_step_time(composed(*SMALL), planned(patch=(8, 8, 8)))
    assert found.seconds is None
    assert re.match(r"a step on 4 x 2 x 2 voxels alone took \d+ s", found.why)


def test_a_step_without_room_is_not_measured(composed):
    found = measure_step_time(composed(*SMALL), planned(peak=MemoryRecord(reserved=2**60)))
    assert found.why.startswith("it needs")
