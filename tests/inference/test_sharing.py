"""Processes share scans, cores and memory."""

import os

import pytest
import torch

from unet3d.errors import RunError, UsageError
from unet3d.inference import sharing
from unet3d.inference.sharing import InferenceResult, run_in_processes
from unet3d.text import GIB


def describe_share(share, ram):
    """Return the share of a process as if it were its result."""
    return InferenceResult(
        num_tasks=share[0] + 1,
        num_skipped=torch.get_num_threads(),
        num_different=1,
        failures=(f"{share} {ram}",),
        out_of_memory=share[0] == 1,
        seconds=float(share[0]),
    )


def die_or_refuse(share, ram):
    if share[0] == 0:
        os._exit(1)
    raise UsageError("cannot")


def test_each_process_has_its_share_of_scans_cores_and_memory(monkeypatch):
    monkeypatch.setattr(sharing, "get_available_bytes", lambda device: 4 * GIB)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        result = run_in_processes(describe_share, 2, "cpu", ram=None)
    finally:
        torch.set_num_threads(threads)
    assert (result.num_tasks, result.num_different, result.seconds) == (3, 2, 1.0)
    assert result.num_skipped == 2 + 2
    assert result.out_of_memory
    part = int(0.9 * 4 * GIB) // 2
    assert result.failures == (f"(0, 2) {part}", f"(1, 2) {part}")


def test_a_process_that_dies_is_an_error_that_says_how_to_go_on():
    with pytest.raises(RunError, match="run the same command again for those that are left"):
        run_in_processes(die_or_refuse, 2, "cpu", ram=None)
