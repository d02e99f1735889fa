import pytest

from unet3d.memory.compiled import get_compiled_range
from unet3d.units import MIB
from unet3d.workflows.memory import training_step
from unet3d.workflows.memory.estimate import estimate_memory, rank_savings


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [["precision=bf16"], ["inference.batch_size=3", "trainer.accelerator=cpu"]]
)
def test_a_few_windows_of_a_volume_have_the_peak_of_all_of_them(composed, monkeypatch, overrides):
    settings = composed("model.depth=2", "model.width=4", *overrides)

    def estimate_validation():
        estimate = estimate_memory(settings, [40, 24, 56])
        return estimate.phases["validation"], len(estimate.trace.events)

    peak_of_few, events_of_few = estimate_validation()
    monkeypatch.setattr(training_step, "PeakWindowsOnly", lambda model, trace: model)
    peak_of_all, events_of_all = estimate_validation()
    assert peak_of_few == peak_of_all
    assert events_of_few < 0.7 * events_of_all


def test_cuda_graphs_keep_their_batch_and_have_a_memory_pool_of_their_own(composed):
    words = ("model.depth=2", "model.width=4", "data.patch_size=[64,64,64]", "precision=16")
    words = (*words, "trainer.accelerator=gpu", "checkpointing=none")
    eager = estimate_memory(composed(*words))
    recorded = estimate_memory(composed(*words, "trainer.cuda_graph=true"))
    batch = composed(*words).data.batch_size * 64**3 * 5
    assert recorded.peak.allocated - eager.peak.allocated == pytest.approx(batch, abs=MIB)
    assert recorded.peak.reserved >= eager.peak.reserved
    start, _ = recorded.steady_step
    assert all(start <= events.start for events in recorded.trace.graph_pool)
    accumulated = estimate_memory(
        composed(*words, "trainer.cuda_graph=true", "trainer.accumulate_grad_batches=2")
    )
    assert accumulated.peak.allocated > recorded.peak.allocated


def test_a_run_of_several_processes_is_estimated_without_cuda_graphs(composed):
    words = ("model.depth=2", "model.width=4", "precision=16", "trainer.devices=2")
    estimate = estimate_memory(composed(*words, "trainer.cuda_graph=true"))
    assert not estimate.trace.graph_pool
    assert estimate.peak == estimate_memory(composed(*words)).peak


def test_a_compiled_step_takes_at_most_what_plain_modules_take(composed):
    words = ("model.depth=2", "model.width=4", "precision=16")
    plain, compiled = (
        estimate_memory(composed(*words, option))
        for option in ("checkpointing=none", "compile=true")
    )
    assert compiled.peak == plain.peak
    least, most = get_compiled_range(compiled)
    assert most == compiled.peak.allocated
    assert 0.4 * most < least < 0.5 * most
    assert rank_savings(composed(*words, "compile=true"), compiled)[0][0] == "compile=false"
