import pytest

from unet3d.workflows.memory import training_step
from unet3d.workflows.memory.estimate import estimate_memory


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
