"""The numbers of a run that the machine is asked about before anything is computed."""

from collections.abc import Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import build_network, make_optimizer_factory
from unet3d.data.augmentation.pipeline import Augment
from unet3d.errors import UsageError
from unet3d.machine import preflight as machine
from unet3d.machine.device import Precision, resolve_device
from unet3d.machine.memory import get_available_bytes
from unet3d.workflows.memory.training_step import PURE

DRAWN = 256
"""Keys whose augmentations tell how much is read around a patch."""


def enforce_requirements(cfg: DictConfig, found: Sequence[machine.Problem]) -> list[str]:
    """Lines on what this machine lacks; Misuse where the run would fail for sure."""
    for lack in found:
        if lack.stop:
            raise UsageError(lack.what)
    if cfg.data.num_workers > 0:
        machine.allow_open_files(cfg.data.num_workers)
    return [lack.what for lack in found]


def find_problems(
    request: ComposedConfig,
    used: Precision,
    *,
    device: str,
    processes: int,
    folder: Path,
    channels: int,
    augment: Augment,
) -> list[machine.Problem]:
    """All that this machine lacks for a run of so many processes here; nothing is changed."""
    cfg = request.config
    patch = list(cfg.data.patch_size)
    if len(patch) != 3 or not all(type(side) is int and side > 0 for side in patch):
        raise UsageError(f"data.patch_size must be three ints >= 1, got {patch}")
    cuda = device == "cuda"
    found = [
        machine.check_torch_build(
            torch.__version__,
            cuda=torch.version.cuda,
            gpu=cuda,
            half=used.used != "32",
            devices=[] if cfg.trainer.accelerator == "cpu" else machine.nvidia_devices(),
        ),
        machine.check_writable(folder / "checkpoints"),
    ]
    if cuda:
        found.append(
            machine.check_gpu_arch(
                torch.__version__,
                torch.cuda.get_arch_list(),
                gpu=torch.cuda.get_device_name(),
                capability=torch.cuda.get_device_capability(),
            )
        )
        if find_spec("triton") is not None:
            found.append(machine.check_triton_cache(machine.triton_cache()))
    workers = cfg.data.num_workers
    if workers > 0:
        batch = estimate_batch_bytes(request, channels, augment, sources=cuda)
        free = get_available_bytes(torch.device("cpu"))
        found += [
            machine.check_shm(
                workers=workers, processes=processes, batch=batch, free=machine.get_free_shm()
            ),
            machine.check_worker_ram(workers=workers, processes=processes, batch=batch, free=free),
            machine.check_open_files(workers, hard=machine.file_limits()[1]),
        ]
    checkpoint = estimate_checkpoint_bytes(request, used)
    if checkpoint is not None:
        found.append(machine.check_disk(folder / "checkpoints", checkpoint=checkpoint))
    return [lack for lack in found if lack is not None]


def estimate_batch_bytes(
    request: ComposedConfig, channels: int, augment: Augment, *, sources: bool
) -> int:
    """A batch as a worker hands it over: patches, or the larger `sources` of their augmentation."""
    patch = list(request.config.data.patch_size)
    voxels = prod(patch)
    if sources:
        moves = (augment.sample_transform(key, patch) for key in range(DRAWN))
        voxels = max(prod(move.source_size(patch)) for move in moves)
    return request.config.data.batch_size * voxels * (4 * channels + 1)


def estimate_checkpoint_bytes(request: ComposedConfig, used: Precision) -> int | None:
    """Weights and what the optimizer keeps of each; None for a network that cannot be had fake."""
    try:
        with FakeTensorMode():
            model = build_network(request)
    except UsageError:
        raise
    except Exception:  # it looks at values as it is made
        return None
    one = nn.Parameter(torch.zeros(1))
    one.grad = torch.zeros(1)
    optimizer = make_optimizer_factory(request.config.copy(), used)([one])  # it fills in values
    optimizer.step()
    state = optimizer.state[one].values()
    moments = sum(isinstance(value, torch.Tensor) and value.ndim == 1 for value in state)
    each = PURE.get(used.used, torch.float32).itemsize
    return sum(p.numel() for p in model.parameters()) * each * (1 + moments)


def count_local_processes(cfg: DictConfig) -> int:
    """How many of them this machine is to start."""
    devices = cfg.trainer.devices
    cuda = resolve_device(str(cfg.trainer.accelerator)) == "cuda"
    there = torch.cuda.device_count() if cuda else None
    if devices == "auto":
        return there or 1
    if type(devices) is not int or devices < 1:
        raise UsageError(f"trainer.devices must be auto or an int >= 1, got {devices!r}")
    if there is not None and devices > there:
        raise UsageError(f"trainer.devices={devices}: this machine has {there} GPUs")
    return devices
