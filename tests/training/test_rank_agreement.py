"""The ranks of a run agree on time, signals and saves."""

import signal
from types import SimpleNamespace

import torch
from torch import distributed

from unet3d.signals import SignalListener
from unet3d.training.callbacks.checkpoints import LastCheckpoint
from unet3d.training.callbacks.stopping import Preemption, StoppingLimits
from unet3d.training.distributed import RankAgreement


def test_ranks_share_a_signal_and_the_clock_that_is_ahead(tmp_path, monkeypatch):
    other = [0.0, 25.0, 1.0, 1.0]  # loss, clock, save, signal
    monkeypatch.setattr(
        distributed, "all_reduce", lambda x, _: x.copy_(torch.maximum(x, torch.tensor(other)))
    )
    ranks, signals = RankAgreement(world_size=2), SignalListener()
    limits = StoppingLimits(ranks, max_seconds=100)
    last = LastCheckpoint(tmp_path, ranks, 60)
    preemption = Preemption(signals, ranks, last.save)
    assert (limits.get_seconds(), last.is_due(), preemption.is_requested()) == (0, False, False)
    assert not ranks.accept(torch.stack(ranks.exchange(torch.tensor(False))).tolist())
    assert limits.fraction_done(SimpleNamespace(max_epochs=None)) == 0.25
    assert last.is_due()
    assert preemption.is_requested()
    signals.received = signal.SIGTERM
    other[1:] = [0.0, 0.0, 0.0]
    ranks.accept(torch.stack(ranks.exchange(torch.tensor(True))).tolist())
    assert preemption.is_requested()
    assert not last.is_due()
