"""Training on a CPU never touches torch.cuda, except to ask whether there is a GPU."""

import sys
from types import ModuleType

import pytest
import torch

from unet3d.commands.train import build_training

ALLOWED = ("is_available", "OutOfMemoryError", "Stream", "Event")
"""What needs no GPU: a question, and names of types."""


class CudaForOthers(ModuleType):
    """torch.cuda, which refuses calls from the package."""

    def __init__(self, cuda):
        super().__init__("torch.cuda")
        self.__dict__["cuda"] = cuda

    def __getattr__(self, name):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("unet3d") and name not in ALLOWED:
            raise AssertionError(f"{caller} uses torch.cuda.{name} without a GPU")
        return getattr(self.__dict__["cuda"], name)


@pytest.mark.parametrize(
    "overrides",
    [(), ("checkpointing=lean",), ("checkpointing=offload",), ("model=dynunet",)],
    ids=lambda overrides: " ".join(overrides) or "default",
)
def test_a_run_on_a_cpu_does_not_use_cuda(composed, tmp_path, monkeypatch, overrides):
    monkeypatch.setattr(torch, "cuda", CudaForOthers(torch.cuda))
    options = ("memory.estimate=true", "trainer.max_steps=2", *overrides)
    run = build_training(composed(*options), tmp_path)
    run.trainer.fit(run.module, run.data)
    assert run.trainer.global_step == 2
