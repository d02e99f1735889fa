"""What a run chooses so that its step fits into memory."""

import pytest
import torch

from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.memory.estimate import UntraceableError, add_context_bytes
from unet3d.memory.fit import LARGER_TILES_MIB, ROOM_FOR_LARGER_TILES
from unet3d.text import MIB
from unet3d.training import preflight
from unet3d.training.preflight import estimate_run_memory


@pytest.mark.slow
def test_tiles_of_a_gpu_are_as_large_as_its_free_memory_allows(composed, tmp_path, monkeypatch):
    words = ("model.depth=2", "model.width=64", "data.patch_size=[96,96,96]")
    run = build_training(composed(*words, "memory.estimate=true"), tmp_path)
    run.data.device, tiles, available = torch.device("cuda"), [], 2**40
    configured = run.module.model.retention
    monkeypatch.setattr(preflight, "get_available_bytes", lambda device: available)
    monkeypatch.setattr(preflight, "check_memory", lambda *_, **__: [])
    for _ in range(4):
        run.module.model.retention = configured
        estimate, notes = estimate_run_memory(run.data, run.precision, run.module)
        tile_bytes = run.module.model.retention.tile_bytes
        tiles.append(None if tile_bytes is None else tile_bytes // MIB)
        assert notes[0] == f"checkpointing.tile_mib=auto: using {tiles[-1]}" or tile_bytes is None
        room = ROOM_FOR_LARGER_TILES if tiles[-1] in LARGER_TILES_MIB else 1
        available = int(add_context_bytes(estimate.run_peak) / room) - 1
    assert tiles == [2048, 256, None, 16]


def test_a_patch_that_the_network_refuses_ends_a_run_before_it_begins(composed, tmp_path):
    with pytest.raises(UsageError, match="levels, too few: use larger patches"):
        build_training(composed("data.patch_size=[1,1,1]", "memory.estimate=true"), tmp_path)


@pytest.mark.slow
def test_tiles_stay_as_configured_where_a_step_cannot_be_estimated(composed, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise UntraceableError("it reads values")

    run = build_training(composed("memory.estimate=true"), tmp_path)
    run.data.device, configured = torch.device("cuda"), run.module.model.retention
    monkeypatch.setattr(preflight, "get_available_bytes", lambda device: 2**40)
    monkeypatch.setattr(preflight, "estimate_resolved_step", refuse)
    assert estimate_run_memory(run.data, run.precision, run.module) == (None, ["it reads values"])
    assert run.module.model.retention == configured
