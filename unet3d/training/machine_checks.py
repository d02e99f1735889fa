"""Check the machine before a run reads its data; `unet3d doctor` shows the same checks.

Lightning is not imported for them.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.data.dataset import get_network_sizes
from unet3d.errors import UsageError
from unet3d.files import find_existing_dir
from unet3d.machine import Precision, resolve_device
from unet3d.memory.cuda_libraries import CUDNN_WITHOUT_CONV3D
from unet3d.memory.fake_tensors import copy_as_fake, use_fake_tensors
from unet3d.memory.fit import check_step_size
from unet3d.memory.script import use_plain_modules
from unet3d.model.fused.conv_ops import is_short
from unet3d.text import GIB, format_bytes, pluralize
from unet3d.training.config import TrainConfig
from unet3d.training.launch import ProcessRank
from unet3d.types import HasRetention

if TYPE_CHECKING:
    from unet3d.training.datamodule import VolumeDataModule

SHM = Path("/dev/shm")

PREFETCH = 2  # batches that each DataLoader worker loads ahead, all of them in shared memory


@dataclass(frozen=True)
class Problem:
    """What is wrong or too small, and what to change; with `is_fatal` a run is certain to fail."""

    message: str
    is_fatal: bool = False


def check_machine(
    data: "VolumeDataModule", precision: Precision, network: nn.Module, folder: Path
) -> list[str]:
    """Raise at a problem that would certainly stop the run; return the others as lines."""
    check_step_size(data.settings.step)
    problems = find_problems(
        data.settings,
        precision,
        device=data.device.type,
        processes=data.process.local_world_size,
        folder=folder,
        is_fused=isinstance(network, HasRetention) and network.retention is not None,
    )
    for problem in problems:
        if problem.is_fatal:
            raise UsageError(problem.message)
    return [problem.message for problem in problems]


def avoid_wrong_gradients(
    precision: Precision, network: nn.Module, shape: Sequence[int], device: str
) -> Precision:
    """Return float32 where torch would compute wrong gradients in bf16; see `ShortMaps`."""
    if device != "cpu" or not precision.used.startswith("bf16"):
        return precision
    maps = ShortMaps()
    with suppress(Exception), use_fake_tensors(), torch.no_grad(), maps:  # if it can be traced
        plain = copy_as_fake(network).eval()
        use_plain_modules(plain)  # fused blocks convolve by the tile
        plain(torch.empty(1, *shape))
    if not maps.found:
        return precision
    reason = "PyTorch's bf16 gradients are wrong on a CPU where maps are shorter than a kernel"
    return replace(precision, used="32", reason=reason)


class ShortMaps(TorchDispatchMode):
    """Find convolutions of plain modules whose bf16 gradients are wrong on a CPU."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.found |= args[0].dim() == 5 and is_short(args[0].shape, args[1].shape)
        return func(*args, **(kwargs or {}))


def find_problems(
    settings: TrainConfig,
    precision: Precision,
    *,
    device: str,
    processes: int,
    folder: Path,
    is_fused: bool,
) -> list[Problem]:
    """Return what is missing on this machine for a run of `processes` processes; change nothing."""
    problems = [check_writable(folder / "checkpoints")]
    if device == "cuda" and precision.used != "32" and not is_fused:
        problems.append(check_cudnn(torch.backends.cudnn.version()))
    elif device != "cuda" and settings.step.accelerator != "cpu":
        problems.append(check_torch_build(sorted(Path("/dev").glob("nvidia[0-9]*"))))
    data = settings.data
    if data.num_workers > 0:
        channels, _ = get_network_sizes(data)
        batch = data.batch_size * prod(data.patch_size) * (4 * channels + 1)
        problems.append(check_shm(workers=processes * data.num_workers, batch=batch))
    return [problem for problem in problems if problem is not None]


def check_writable(folder: Path) -> Problem | None:
    """Check that files can be created in the folder, or the folder in its parent."""
    existing = find_existing_dir(folder)
    try:
        with TemporaryFile(dir=existing):
            return None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return Problem(f"{existing} is not writable: {reason}", is_fatal=True)


def check_cudnn(cudnn: int | None) -> Problem | None:
    """Check whether torch gives half-precision 3D convolutions to this version of cuDNN.

    Fused blocks are not concerned: they compute channels-last.
    """
    if cudnn is None or cudnn not in CUDNN_WITHOUT_CONV3D:
        return None
    return Problem(
        f"cuDNN {cudnn // 10_000}.{cudnn % 10_000 // 100}: torch computes half-precision 3D "
        "convolutions of plain modules without it, in many times the memory and the time "
        "(pytorch#166643): install cuDNN 9.15 or newer (nvidia-cudnn-cu12 or -cu13), or use fused "
        "blocks"
    )


def check_torch_build(devices: Sequence[Path]) -> Problem | None:
    """Say why torch may find none of the GPUs that have device files."""
    if not devices:
        return None
    what, fix = "was built without CUDA", "install a CUDA build"
    if torch.version.cuda is not None:
        what = f"for CUDA {torch.version.cuda} finds no GPU"
        fix = "check that nvidia-smi works and that the driver is new enough"
    return Problem(
        f"torch {torch.__version__} {what}, but the machine has an NVIDIA GPU ({devices[0]}): {fix}"
    )


def check_shm(*, workers: int, batch: int) -> Problem | None:
    """Check shared memory for the workers' batches; too little kills workers with SIGBUS."""
    needed = workers * PREFETCH * batch
    if not SHM.is_dir() or needed <= (free := shutil.disk_usage(SHM).free):
        return None
    return Problem(
        f"{SHM} has {format_bytes(free)} left, but the batches of {workers} workers need "
        f"{format_bytes(needed)}: start the container with --shm-size={ceil(1.25 * needed / GIB)}g "
        "or use data.num_workers=0",
        is_fatal=True,
    )


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
