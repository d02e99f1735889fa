from types import SimpleNamespace

import pytest

from unet3d.errors import Interrupted
from unet3d.lit.callbacks import preemption
from unet3d.lit.callbacks.preemption import Preemption
from unet3d.stop_signals import SignalListener


def test_no_rank_exits_before_rank_0_has_saved_its_checkpoint(monkeypatch):
    events = []
    last = SimpleNamespace(save=lambda trainer: events.append("saved"))
    monkeypatch.setattr(
        preemption,
        "is_set_on_any_rank",
        lambda trainer, flag: events.append("synchronized") or True,
    )
    trainer = SimpleNamespace(global_step=1)
    with pytest.raises(Interrupted):
        Preemption(SignalListener(), last).on_validation_batch_end(trainer)
    assert events == ["synchronized", "saved", "synchronized"]
