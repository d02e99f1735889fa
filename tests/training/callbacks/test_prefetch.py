import pytest
import torch

from unet3d.commands.train import build_training
from unet3d.training.datamodule import Prefetch


def train(run):
    run.trainer.fit(run.module, run.data.train_loader)
    return torch.cat([p.detach().flatten() for p in run.module.model.parameters()])


def test_prefetching_changes_neither_order_nor_number_of_batches(composed, tmp_path):
    results = []
    for prefetch in (False, True):
        overrides = ["fold=none", "trainer.max_epochs=2", "trainer.max_steps=null"]
        run = build_training(composed(*overrides, "data.num_workers=1"), tmp_path / str(prefetch))
        if prefetch:
            run.trainer.callbacks.append(Prefetch())
        results.append((train(run), run.trainer.global_step))
    assert results[0][1] == results[1][1] == 6
    assert results[0][0].equal(results[1][0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_gpu_the_next_batch_is_prefetched(composed, tmp_path, num_workers):
    overrides = ["trainer.accelerator=gpu", "trainer.max_steps=12", "augmentation=nnunet"]
    run = build_training(
        composed(*overrides, "fold=none", f"data.num_workers={num_workers}"), tmp_path
    )
    assert [c for c in run.trainer.callbacks if isinstance(c, Prefetch)]
    train(run)
    assert all(0 <= share < 1 for share in run.callbacks.timing.shares[1:])
