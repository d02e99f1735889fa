from types import SimpleNamespace

import pytest

from unet3d.errors import Interrupted
from unet3d.lit.callbacks import preemption
from unet3d.lit.callbacks.preemption import Preemption, SignalListener


def test_no_rank_leaves_before_the_first_has_written_its_checkpoint(monkeypatch):
    done = []
    last = SimpleNamespace(save=lambda trainer: done.append("saved"))
    monkeypatch.setattr(preemption, "any_rank", lambda trainer, flag: done.append("met") or True)
    trainer = SimpleNamespace(global_step=1)
    with pytest.raises(Interrupted):
        Preemption(SignalListener(), last).on_validation_batch_end(trainer)
    assert done == ["met", "saved", "met"]
