import pytest
import torch

from unet3d.lit.callbacks.prefetch import Prefetch
from unet3d.workflows.training.build import build_training


def weights(run):
    run.trainer.fit(run.task, run.train_loader)
    return torch.cat([p.detach().flatten() for p in run.task.model.parameters()])


def test_fetching_ahead_changes_neither_order_nor_length(composed, tmp_path):
    found = []
    for ahead in (False, True):
        words = ["fold=none", "trainer.max_epochs=2", "trainer.max_steps=null"]
        run = build_training(composed(*words, "data.num_workers=1"), tmp_path / str(ahead))
        if ahead:
            run.trainer.callbacks.append(Prefetch(run.train_loader))
        found.append((weights(run), run.trainer.global_step))
    assert found[0][1] == found[1][1] == 6
    assert found[0][0].equal(found[1][0])


def test_a_cpu_has_nothing_to_fetch_ahead_to(composed, tmp_path):
    run = build_training(composed(), tmp_path)
    assert not [c for c in run.trainer.callbacks if isinstance(c, Prefetch)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_gpu_the_next_batch_is_there_when_a_step_begins(composed, tmp_path, num_workers):
    words = ["trainer.accelerator=gpu", "trainer.max_steps=12", "augmentation=nnunet"]
    run = build_training(composed(*words, "fold=none", f"data.num_workers={num_workers}"), tmp_path)
    assert [c for c in run.trainer.callbacks if isinstance(c, Prefetch)]
    weights(run)
    assert all(0 <= share < 1 for share in run.speed.shares[1:])
