import pytest

from unet3d.commands.train import build_training
from unet3d.training.datamodule import Prefetch


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_gpu_the_next_batch_is_prefetched(composed, tmp_path, num_workers):
    overrides = ["trainer.accelerator=gpu", "trainer.max_steps=12", "augmentation=nnunet"]
    run = build_training(
        composed(*overrides, "fold=none", f"data.num_workers={num_workers}"), tmp_path
    )
    assert [c for c in run.trainer.callbacks if isinstance(c, Prefetch)]
    run.trainer.fit(run.module, run.data.train_loader)
    assert all(0 <= share < 1 for share in run.callbacks.timing.shares[1:])
