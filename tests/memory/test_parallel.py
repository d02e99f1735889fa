import os

import pytest
import torch

from unet3d.errors import UsageError
from unet3d.memory import parallel
from unet3d.memory.parallel import map_in_processes

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")


@forks
def test_results_and_errors_come_in_order_from_other_processes(monkeypatch):
    monkeypatch.setattr(parallel, "count_usable_cores", lambda: 2)

    def refuse(number):
        raise UsageError(f"no {number}")

    factor = 3  # closures are inherited
    results = list(map_in_processes(lambda n: (factor * n, os.getpid()), range(6)))
    assert [n for n, _ in results] == [0, 3, 6, 9, 12, 15]
    assert os.getpid() not in {process for _, process in results}
    with pytest.raises(UsageError, match="no 7"):
        list(map_in_processes(refuse, [7, 8]))


@pytest.mark.parametrize("obstacle", ["one core", "GPU"])
def test_where_forks_do_not_help_everything_runs_in_this_process(monkeypatch, obstacle):
    monkeypatch.setattr(parallel, "count_usable_cores", lambda: 1 if obstacle == "one core" else 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: obstacle == "GPU")
    assert set(map_in_processes(lambda _: os.getpid(), range(3))) == {os.getpid()}


@forks
def test_everything_runs_in_this_process_where_forks_cannot_differentiate(monkeypatch):
    """As in torch 2.14 after a backward."""

    def fail(tensor):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    monkeypatch.setattr(parallel, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(torch.Tensor, "backward", fail)
    assert list(map_in_processes(lambda _: os.getpid(), range(3))) == 3 * [os.getpid()]
