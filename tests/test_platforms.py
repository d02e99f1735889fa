"""What works without a compiler."""

import torch

from unet3d.commands.train import build_training
from unet3d.model.fused.kernels import cpu as fused
from unet3d.pool.kernels import cpu as pooling


def train_one_step(settings, folder):
    """Return the weights after a step."""
    run = build_training(settings, folder)
    run.trainer.fit(run.module, run.data)
    return [parameter.detach() for parameter in run.module.parameters()]


def test_a_step_without_a_compiler_equals_one_with_kernels(composed, tmp_path, monkeypatch, caplog):
    settings = composed("optimizer=sgd")  # AdamW divides by the gradient, however small it is
    compiled = train_one_step(settings, tmp_path / "compiled")
    for kernels in (fused.kernels, pooling.kernels):
        assert kernels.libraries[torch.float32] is not None
        monkeypatch.setattr(kernels, "libraries", {})
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    plain = train_one_step(settings, tmp_path / "plain")
    torch.testing.assert_close(plain, compiled)
    messages = [r.getMessage() for r in caplog.records if "compiler" in r.getMessage()]
    fallback = "no C++ compiler found: the {} kernels fall back to plain PyTorch, slowly"
    for message, name in zip(sorted(messages), ("fused-block", "pooling"), strict=True):
        assert message.startswith(fallback.format(name))
