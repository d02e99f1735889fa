"""The process group of a run: how ranks join and leave it, and what they share in it."""

import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from unet3d.errors import DoesNotFitError, RunError, UsageError, summarize_error
from unet3d.machine import resolve_device
from unet3d.signals import handle_stop_signals
from unet3d.training.config import TrainConfig
from unet3d.training.launch import ProcessRank

POLL_SECONDS = 0.05

COMMUNICATION_ERRORS = ("gloo", "Connection closed by peer", "Timed out waiting")
"""What messages of torch hold when another rank has ended or hangs."""


def find_device(settings: TrainConfig, process: ProcessRank) -> torch.device:
    """Return the device on which a process trains; it becomes the process's GPU."""
    kind = resolve_device(settings.step.accelerator)
    if kind != "cuda":
        return torch.device(kind)
    num_gpus = torch.cuda.device_count()
    if process.world_size > 1 and num_gpus > 1:  # SLURM's --gpus-per-task shows each process one
        if num_gpus < process.local_world_size:
            raise UsageError(
                f"{process.local_world_size} processes on this machine, but rank {process.rank} "
                f"sees {num_gpus} GPUs: start one process per GPU"
            )
        torch.cuda.set_device(process.local_rank)
    return torch.device(kind, torch.cuda.current_device())


def choose_environment(process: ProcessRank, launch: str) -> ClusterEnvironment:
    """Return what tells Lightning the rank of this process, so that it does not guess.

    The ranks that `unet3d train` starts on this machine have the variables of torchrun.
    """
    if process.world_size == 1:
        return LightningEnvironment()
    return SLURMEnvironment(auto_requeue=False) if launch == "slurm" else TorchElasticEnvironment()


@contextmanager
def join_process_group(settings: TrainConfig, process: ProcessRank) -> Generator[None]:
    """Join and leave the process group of a run; its timeout applies to every collective.

    Lightning would create it when the training starts, but rank 0 prepares the data before.
    """
    if process.world_size == 1:
        yield
        return
    environment = choose_environment(process, settings.trainer.launch)
    device, timeout_seconds = find_device(settings, process), settings.trainer.timeout_seconds
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    try:
        with handle_stop_signals(signal.SIG_DFL):  # Python's wait until all ranks have joined
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                rank=process.rank,
                world_size=process.world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
        yield
        leave_process_group()  # not after an error: it would wait for the other ranks
    except (RunError, DoesNotFitError):
        raise
    except RuntimeError as error:
        is_of_ranks = any(sign in str(error) for sign in COMMUNICATION_ERRORS)
        if not (is_of_ranks or isinstance(error, dist.DistError)):
            raise
        reason = re.sub(r"^\[\S+\] ", "", summarize_error(error)).partition(". ")[0]
        raise RunError(
            f"rank {process.rank} got no answer from another rank, which has ended, or has not "
            f"answered for trainer.timeout_seconds={timeout_seconds:g}; rerun with resume=auto "
            f"({reason})"
        ) from error


def leave_process_group() -> None:
    """Leave the process group, if there is one, once all ranks are ready to."""
    if dist.is_initialized():
        is_nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if is_nccl else None)
        dist.destroy_process_group()


class RankAgreement:
    """Share values that each rank knows alone: all see the maximum, until the next step.

    Each rank has a clock and signals of its own, but all have one learning rate, save together, and
    end together. There is one collective in a step. It is queued on the device, so that the host
    waits for it together with the loss.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.questions: list[Callable[[], float]] = []
        self.maxima: Sequence[float] = ()  # the answers; none of a single process

    def share(self, ask: Callable[[], float]) -> Callable[[], float]:
        """Return what all ranks agreed on instead of `ask`; a single process answers itself.

        All ranks must share the same values in the same order.
        """
        number = len(self.questions)
        self.questions.append(ask)
        return lambda: self.maxima[number] if self.maxima else ask()

    def exchange(self, flag: Tensor) -> list[Tensor]:
        """Queue the collective; return the maxima of a flag on the device and of all answers."""
        if self.world_size == 1:
            return []
        local = [0.0, *(float(ask()) for ask in self.questions)]
        shared = torch.tensor(local, pin_memory=flag.is_cuda).to(flag.device, non_blocking=True)
        shared[0] = flag
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return list(shared.unbind())

    def accept(self, maxima: Sequence[float]) -> bool:
        """Take over what the host has read of `exchange`; return the flag."""
        flag, *self.maxima = maxima
        return bool(flag)


class CudaGraphStrategy(DDPStrategy):
    """Average the gradients of all ranks after backward, in one collective.

    A replay of CUDA graphs does not call the hooks by which DistributedDataParallel averages them.
    """

    def configure_ddp(self) -> None:
        """Start with the weights of rank 0, without DistributedDataParallel."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, 0)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Average the gradients: the module has run backward before it calls this."""
        average_gradients(p for group in optimizer.param_groups for p in group["params"])
        return super().optimizer_step(optimizer, *args, **kwargs)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their means over all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = gradients[0].new_empty(sum(map(torch.numel, gradients)), dtype=torch.float32)
    parts = flat.split([gradient.numel() for gradient in gradients])
    shaped = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(shaped, gradients)
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    torch._foreach_copy_(gradients, shaped)


@contextmanager
def rank_zero_first(process: ProcessRank, what: str) -> Generator[None]:
    """Run the body on rank 0 first; the other ranks run it once rank 0 is done, hours later."""
    if process.world_size == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    while process.rank > 0 and not store.check([what]):  # Store.wait would not handle signals
        time.sleep(POLL_SECONDS)
    yield
    if process.rank == 0:
        store.set(what, "")


def gather_in_case_order(trainer: Trainer, results: list[Any]) -> list[Any]:
    """Return the results of all ranks, which took the cases in turns, in the order of cases."""
    if trainer.world_size == 1:
        return results
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, results)
    longest = max(map(len, parts))
    return [part[n] for n in range(longest) for part in parts if n < len(part)]
