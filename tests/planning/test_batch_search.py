import pytest
import torch

from unet3d.__main__ import main
from unet3d.errors import UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.estimate import BatchExtrapolation, find_fitting_batch
from unet3d.memory.from_config import estimate_configured_step
from unet3d.planning import suggest
from unet3d.planning.suggest import count_flops
from unet3d.text import GIB


@pytest.fixture
def step(composed):
    words = "model.width=16", "model.depth=2", "data.patch_size=[32,32,32]"
    return composed(*words, "trainer.accelerator=auto").step


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32", "16"])
def test_two_traces_determine_every_batch_size(step, precision):
    def estimate(batch):
        return estimate_configured_step(
            step.vary({"precision": precision, "data.batch_size": batch})
        )

    extrapolation = BatchExtrapolation(estimate(2), estimate(3))
    assert extrapolation.affine
    for batch in (5, 11):
        assert extrapolation.peak(batch) == estimate(batch).peak


def test_a_search_limited_to_a_batch_of_two_tries_one_where_two_do_not_fit(step):
    peaks = [estimate_configured_step(step.vary({"data.batch_size": n})).peak for n in (1, 2)]
    for peak, limit, expected in (
        (peaks[1], 2, (2, peaks[1])),
        (peaks[1], 1, (1, peaks[0])),
        (peaks[0], 2, (1, peaks[0])),
    ):
        budget = peak.reserved + CUDA_CONTEXT_BYTES
        assert suggest.find_largest_batch(step, budget, limit=limit) == expected
    assert suggest.find_largest_batch(step, CUDA_CONTEXT_BYTES, limit=2) is None


def test_a_batch_that_cannot_be_extrapolated_is_an_error_that_says_what_to_do(step):
    def estimate(batch):
        return estimate_configured_step(
            step.vary({"checkpointing": "lean" if batch == 3 else "none"})
        )

    with pytest.raises(UsageError, match="differently at batch sizes 2 and 3; try sizes one by on"):
        find_fitting_batch(estimate, GIB)


def test_memory_that_is_freed_after_the_step_does_not_prevent_extrapolation(step):
    """Python collects the cycles of a step at any time after it."""
    two, three = (
        estimate_configured_step(step.vary({"data.batch_size": n}), validates=False) for n in (2, 3)
    )
    del three.trace.events[three.steady_step[1] :]
    assert BatchExtrapolation(two, three).affine


def test_a_budget_is_given_in_gib(monkeypatch):
    assert suggest.get_budget_bytes(1.5) == 1536 * 2**20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="finds no GPU"):
        suggest.get_budget_bytes(None)


def test_recomputing_every_block_costs_a_third_more_work(step):
    plain, recomputed = (count_flops(step, strategy) for strategy in ("none", "blocks"))
    assert 0.25 < recomputed / plain - 1 < 0.36


def test_suggest_keeps_the_overrides_of_the_command_line(capsys):
    words = ["precision=16", "checkpointing=none", "data.batch_size=3", "model.depth=2"]
    assert main(["suggest", "budget_gib=2", "data.patch_size=[16,16,16]", *words]) == 0
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert "batch 3" in shown.err
