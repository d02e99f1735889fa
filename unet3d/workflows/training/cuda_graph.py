"""Decide whether the batches of a run are replayed as CUDA graphs."""

import torch

from unet3d.checkpointing.offload import OffloadActivations
from unet3d.config.settings.training import TrainingSettings
from unet3d.lit.cuda_graph import CudaGraphs, Recorder
from unet3d.machine.distributed_env import ProcessRank


def choose_recorder(
    settings: TrainingSettings, device: str, process: ProcessRank
) -> tuple[Recorder | None, list[str]]:
    """Return what records batches, if anything does; also say why `cuda_graph=true` does not."""
    if settings.trainer.cuda_graph is not True:
        return None, []
    obstacle = find_obstacle(settings, device, process)
    if obstacle is not None:
        return None, [f"trainer.cuda_graph=true has no effect: {obstacle}"]
    return CudaGraphs(torch.device(device, process.gpu_index)), []


def find_obstacle(settings: TrainingSettings, device: str, process: ProcessRank) -> str | None:
    """Return why batches cannot be recorded."""
    if device != "cuda":
        return f"a {device} device has no CUDA graphs"
    if process.world_size > 1:
        return "several processes exchange gradients during backward"
    if settings.compile:
        return "compile=true launches compiled code itself"
    strategy = settings.checkpointing()
    if isinstance(strategy, OffloadActivations):
        return "checkpointing=offload copies to host memory, which it allocates in each step"
    return None
