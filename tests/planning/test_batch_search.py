import pytest
import torch

from unet3d.__main__ import main
from unet3d.commands.suggest import count_flops
from unet3d.errors import UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory import fit
from unet3d.memory.batches import BatchExtrapolation, find_fitting_batch
from unet3d.memory.estimate import add_context_bytes
from unet3d.memory.fit import estimate_configured_step


@pytest.fixture
def step(composed):
    words = "model.width=16", "model.depth=2", "data.patch_size=[32,32,32]"
    return composed(*words, "trainer.accelerator=auto").step


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "device"), [("32", "auto"), ("16", "auto"), ("32", "cpu")])
def test_two_traces_determine_every_batch_size(step, precision, device):
    def estimate(batch):
        changes = {"precision": precision, "data.batch_size": batch, "accelerator": device}
        return estimate_configured_step(step.vary(changes))

    extrapolation = BatchExtrapolation(estimate(2), estimate(3))
    assert extrapolation.affine
    for batch in (5, 11):
        assert extrapolation.peak(batch) == estimate(batch).run_peak


def test_tiles_of_mednext_do_not_depend_on_the_batch(composed):
    words = "model=mednext_s", "model.init_filters=8", "data.patch_size=[32,32,32]"
    step = composed(*words, "trainer.accelerator=cuda").step
    two, three, eight = (
        estimate_configured_step(step.vary({"data.batch_size": n}), validates=False)
        for n in (2, 3, 8)
    )
    extrapolation = BatchExtrapolation(two, three)
    assert extrapolation.affine
    assert extrapolation.peak(8) == eight.peak
    assert count_flops(step, "lean") > count_flops(step, "fused") > count_flops(step, "none")


def test_a_search_limited_to_a_batch_of_two_tries_one_where_two_do_not_fit(step):
    peaks = [estimate_configured_step(step.vary({"data.batch_size": n})).run_peak for n in (1, 2)]
    for peak, limit, expected in (
        (peaks[1], 2, (2, peaks[1])),
        (peaks[1], 1, (1, peaks[0])),
        (peaks[0], 2, (1, peaks[0])),
    ):
        budget = peak.reserved + CUDA_CONTEXT_BYTES
        assert fit.find_largest_batch(step, budget, limit=limit) == expected
    assert fit.find_largest_batch(step, CUDA_CONTEXT_BYTES, limit=2) is None


def test_a_batch_that_cannot_be_extrapolated_is_found_by_trying_sizes(step):
    def estimate(batch):
        strategy = "lean" if batch == 3 else "none"
        return estimate_configured_step(
            step.vary({"data.batch_size": batch, "checkpointing": strategy}), validates=False
        )

    budget = add_context_bytes(estimate(5).peak)
    assert find_fitting_batch(estimate, budget, 20) == (5, estimate(5).peak)


def test_memory_that_is_freed_after_the_step_does_not_prevent_extrapolation(step):
    """Python collects the cycles of a step at any time after it."""
    two, three = (
        estimate_configured_step(step.vary({"data.batch_size": n}), validates=False) for n in (2, 3)
    )
    del three.trace.events[three.steady_step[1] :]
    assert BatchExtrapolation(two, three).affine


def test_a_budget_is_given_in_gib(monkeypatch):
    assert fit.get_budget_bytes(1.5) == 1536 * 2**20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="finds no GPU"):
        fit.get_budget_bytes(None)


def test_recomputing_every_block_costs_a_third_more_work(step):
    plain, recomputed = (count_flops(step, strategy) for strategy in ("none", "blocks"))
    assert 0.25 < recomputed / plain - 1 < 0.36


def test_suggest_keeps_the_overrides_of_the_command_line(capsys):
    words = ["precision=16", "checkpointing=none", "data.batch_size=3", "model.depth=2"]
    assert main(["suggest", "budget_gib=2", "data.patch_size=[16,16,16]", *words]) == 0
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert "batch 3" in shown.err
