import pytest

from unet3d.workflows.memory import training_step
from unet3d.workflows.memory.estimate import estimate_memory


@pytest.mark.parametrize(
    "words", [["precision=bf16"], ["inference.batch_size=3", "trainer.accelerator=cpu"]]
)
def test_a_few_windows_of_a_volume_tell_what_all_of_them_take(composed, monkeypatch, words):
    few_windows = training_step.PeakWindowsOnly

    class Every:
        def __new__(cls, model, trace):
            return model

    def foreseen(kind):
        monkeypatch.setattr(training_step, "PeakWindowsOnly", kind)
        request = composed("model.depth=2", "model.width=4", *words)
        prediction = estimate_memory(request, [40, 24, 56])
        return prediction.phases["validation"], len(prediction.trace.events)

    few, fewer = foreseen(few_windows)
    every, all_of_them = foreseen(Every)
    assert few == every
    assert fewer < 0.7 * all_of_them
