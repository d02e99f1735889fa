"""Check before a run that this machine has what it needs."""

from math import prod
from pathlib import Path

import torch
from torch import nn

from unet3d.data.dataset import get_network_sizes
from unet3d.errors import UsageError
from unet3d.machine import TRUE_HALF_TYPES, Precision, ProcessRank, resolve_device
from unet3d.memory.cuda_libraries import CUDNN_WITHOUT_CONV3D
from unet3d.memory.from_config import check_step_size
from unet3d.text import pluralize
from unet3d.training import machine_checks as machine
from unet3d.training.config import TrainConfig
from unet3d.types import HasRetention

NUM_AUGMENTATIONS = 256
"""Augmentations that are sampled to find how much is read around a patch."""


def check_machine(
    settings: TrainConfig,
    precision: Precision,
    network: nn.Module,
    *,
    device: str,
    folder: Path,
    processes: int,
) -> list[str]:
    """Raise at a problem that would certainly stop the run; return the others as lines."""
    check_step_size(settings.step)
    is_fused = isinstance(network, HasRetention) and network.retention is not None
    problems = find_problems(
        settings, precision, device=device, processes=processes, folder=folder, is_fused=is_fused
    )
    nbytes = estimate_checkpoint_bytes(network, precision)
    space = machine.check_disk(folder / "checkpoints", checkpoint=nbytes)
    problems += [] if space is None else [space]
    for problem in problems:
        if problem.is_fatal:
            raise UsageError(problem.message)
    return [problem.message for problem in problems]


def find_problems(
    settings: TrainConfig,
    precision: Precision,
    *,
    device: str,
    processes: int,
    folder: Path,
    is_fused: bool,
) -> list[machine.Problem]:
    """Return what is missing on this machine for a run of `processes` processes; change nothing."""
    cuda = device == "cuda"
    problems = [machine.check_writable(folder / "checkpoints")]
    if cuda:
        problems.append(
            check_cudnn(
                torch.backends.cudnn.version(), half=precision.used != "32", is_fused=is_fused
            )
        )
    elif settings.step.accelerator != "cpu":
        build, devices = torch.version.cuda, machine.list_nvidia_devices()
        problems.append(machine.check_torch_build(torch.__version__, cuda=build, devices=devices))
    workers = settings.data.num_workers
    if workers > 0:
        batch = estimate_batch_bytes(settings, with_margins=cuda)
        free = machine.get_free_shm()
        problems.append(
            machine.check_shm(workers=workers, processes=processes, batch=batch, free=free)
        )
    return [problem for problem in problems if problem is not None]


def check_cudnn(cudnn: int | None, *, half: bool, is_fused: bool) -> machine.Problem | None:
    """Check whether torch gives half-precision 3D convolutions to this version of cuDNN.

    Fused blocks are not concerned: they compute channels-last.
    """
    if cudnn is None or cudnn not in CUDNN_WITHOUT_CONV3D or not half or is_fused:
        return None
    number = f"{cudnn // 10_000}.{cudnn % 10_000 // 100}"
    return machine.Problem(
        f"cuDNN {number}: torch computes half-precision 3D convolutions of plain modules without "
        "it, in many times the memory and the time (pytorch#166643): install cuDNN 9.15 or newer "
        "(nvidia-cudnn-cu12 or -cu13), or use fused blocks"
    )


def estimate_batch_bytes(settings: TrainConfig, *, with_margins: bool) -> int:
    """Return the bytes of a batch from a worker: patches, or the contexts of augmentation."""
    patch_size = list(settings.data.patch_size)
    voxels, (channels, _) = prod(patch_size), get_network_sizes(settings.data)
    if with_margins:
        sample = settings.augmentation().sample_transform
        samples = [sample(seed, patch_size) for seed in range(NUM_AUGMENTATIONS)]
        voxels = max(prod(transform.compute_context_size(patch_size)) for transform in samples)
    return settings.data.batch_size * voxels * (4 * channels + 1)


def estimate_checkpoint_bytes(network: nn.Module, precision: Precision) -> int:
    """Return the bytes of weights and two moments of each, as Adam has them."""
    item_bytes = TRUE_HALF_TYPES.get(precision.used, torch.float32).itemsize
    return 3 * item_bytes * sum(p.numel() for p in network.parameters())


def count_local_processes(settings: TrainConfig, process: ProcessRank | None = None) -> int:
    """Return how many processes this one is to start; 1 if a launcher has started them."""
    trainer = settings.trainer
    if trainer.launch != "local" or (process is not None and process.world_size > 1):
        return 1
    cuda = resolve_device(settings.step.accelerator) == "cuda"
    num_gpus = torch.cuda.device_count() if cuda else None
    processes = (num_gpus or 1) if trainer.devices == "auto" else trainer.devices
    if num_gpus is not None and processes > num_gpus:
        raise UsageError(
            f"trainer.devices={processes}, but torch finds {pluralize(num_gpus, 'GPU')}: lower it, "
            "or set it to auto"
        )
    return processes
