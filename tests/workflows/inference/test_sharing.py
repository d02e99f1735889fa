import os
from pathlib import Path

import pytest

from unet3d.config.compose import compose_config
from unet3d.config.settings.inference import parse_inference
from unet3d.errors import RunError, UsageError
from unet3d.units import GIB
from unet3d.workflows.inference.sharing import (
    InferenceResult,
    run_in_processes,
    split_settings,
)


def make_settings(*words):
    paths = ["checkpoint=a.ckpt", "input=in", "output=out", "device=cpu"]
    return parse_inference(compose_config([*paths, *words], "predict"))


def describe_share(settings):
    """Return the share of a process as if it were its result."""
    return InferenceResult(
        num_tasks=settings.share[0] + 1,
        num_skipped=0,
        num_different=1,
        failures=(f"{settings.share} {settings.memory_bytes}",),
        out_of_memory=settings.share[0] == 1,
        seconds=float(settings.share[0]),
    )


def die_or_refuse(settings):
    if settings.share[0] == 0:
        os._exit(1)
    raise UsageError("cannot")


def test_each_process_has_its_share_of_scans_and_memory():
    result = run_in_processes(make_settings("memory_gib=4"), 2, describe_share)
    assert (result.num_tasks, result.num_different, result.seconds) == (3, 2, 1.0)
    assert result.out_of_memory
    assert result.failures == (f"(0, 2) {2 * GIB}", f"(1, 2) {2 * GIB}")


def test_a_process_that_dies_is_an_error_that_says_how_to_go_on():
    with pytest.raises(RunError, match="run the same command again for those that are left"):
        run_in_processes(make_settings(), 2, die_or_refuse)


def test_processes_share_the_free_memory():
    parts = split_settings(make_settings(), 4)
    if Path("/proc/meminfo").exists():
        assert sum(part.memory_bytes for part in parts) < GIB * 2**10
    assert [part.share for part in parts] == [(0, 4), (1, 4), (2, 4), (3, 4)]
