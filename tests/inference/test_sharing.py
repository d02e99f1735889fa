"""Processes share scans, cores and memory."""

import os

import pytest
import torch

from unet3d.errors import RunError, UsageError
from unet3d.inference import scans
from unet3d.inference.scans import run_in_processes
from unet3d.text import GIB


def describe_share(share, ram):
    return share, torch.get_num_threads(), ram


def die_or_refuse(share, ram):
    if share[0] == 0:
        os._exit(1)
    raise UsageError("cannot")


def test_each_process_has_its_share_of_scans_cores_and_memory(monkeypatch):
    monkeypatch.setattr(scans, "get_available_bytes", lambda device: 4 * GIB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    results = run_in_processes(describe_share, 2, "cpu", ram=None)
    assert results == [((n, 2), 2, int(0.9 * 4 * GIB) // 2) for n in (0, 1)]


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_that_says_how_to_go_on():
    with pytest.raises(RunError, match="run the same command again for those that are left"):
        run_in_processes(die_or_refuse, 2, "cpu", ram=None)
