"""Equal seeds give equal runs."""

import pytest
import torch

from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.signals import SignalListener
from unet3d.training import preflight
from unet3d.training.preflight import estimate_run_memory
from unet3d.training.run import explain_errors


@pytest.fixture(autouse=True)
def restore_torch(monkeypatch):
    """Undo what Lightning sets, also for cuBLAS, whose workspace estimates of other tests count."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)


def train(settings, folder):
    run = build_training(settings, folder)
    assert torch.are_deterministic_algorithms_enabled()
    with explain_errors(run, None, SignalListener()):
        run.trainer.fit(run.module, run.data.train_loader)
    return run.module.state_dict()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equal_seeds_give_equal_weights(composed, tmp_path, device):
    words = (f"trainer.accelerator={device}", "pool=median", "precision=16", "fold=0")
    settings = composed("trainer.deterministic=true", "trainer.max_steps=4", *words)
    first, second = (train(settings, tmp_path / name) for name in ("first", "second"))
    assert not [name for name, value in first.items() if not value.equal(second[name])]


@pytest.mark.slow
def test_tiles_do_not_depend_on_the_memory_that_is_free(composed, tmp_path, monkeypatch):
    settings = composed("trainer.deterministic=true", "memory.estimate=true")
    run = build_training(settings, tmp_path)
    run.data.device, configured = torch.device("cuda"), run.module.model.retention
    monkeypatch.setattr(preflight, "get_available_bytes", lambda device: 2**40)
    monkeypatch.setattr(preflight, "check_memory", lambda *_, **__: [])
    estimate_run_memory(run.data, run.precision, run.module)
    assert run.module.model.retention == configured


def test_an_operation_without_a_deterministic_algorithm_is_named(composed, tmp_path, monkeypatch):
    settings = composed("trainer.deterministic=true", "trainer.max_steps=1", "fold=0")
    values, index = torch.zeros(2), torch.zeros(1, dtype=torch.long)
    monkeypatch.setattr(
        "unet3d.training.module.SegmentationModule.training_step",
        lambda *_: values.put_(index, torch.ones(1)).sum(),
    )
    with pytest.raises(UsageError, match="deterministic=true: put_ does not have a deterministic"):
        train(settings, tmp_path)
