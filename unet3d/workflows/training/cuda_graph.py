"""Decide whether the batches of a run are replayed as CUDA graphs."""

import torch

from unet3d.config.settings.training import TrainingSettings
from unet3d.lit.cuda_graph import CudaGraphs
from unet3d.machine.distributed_env import ProcessRank
from unet3d.workflows.shared.cuda_graph import find_cuda_graph_obstacle


def choose_graphs(
    settings: TrainingSettings, device: torch.device, process: ProcessRank
) -> tuple[CudaGraphs | None, list[str]]:
    """Return what records batches, if anything does; also say why `cuda_graph=true` does not."""
    if settings.trainer.cuda_graph is not True:
        return None, []
    several_processes = process.world_size > 1
    obstacle = find_cuda_graph_obstacle(settings, device.type, several_processes=several_processes)
    if obstacle is not None:
        return None, [f"trainer.cuda_graph=true has no effect: {obstacle}"]
    return CudaGraphs(device), []
