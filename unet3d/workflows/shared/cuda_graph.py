"""Say whether the batches of a run can be replayed as CUDA graphs."""

from unet3d.checkpointing.offload import OffloadActivations
from unet3d.config.settings.training import TrainingSettings


def find_cuda_graph_obstacle(
    settings: TrainingSettings, device: str, *, several_processes: bool
) -> str | None:
    """Return why batches cannot be recorded."""
    if device != "cuda":
        return f"a {device} device has no CUDA graphs"
    if several_processes:
        return "several processes exchange gradients during backward"
    if settings.compile:
        return "compile=true launches compiled code itself"
    if isinstance(settings.checkpointing(), OffloadActivations):
        return "checkpointing=offload copies to host memory, which it allocates in each step"
    return None
