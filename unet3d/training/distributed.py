"""The processes of a distributed run: their process group, and what they share."""

import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch import nn

from unet3d.errors import DoesNotFitError, RunError, summarize_error
from unet3d.machine import ProcessRank
from unet3d.stop_signals import let_signals_end_process

POLL_SECONDS = 0.1


def choose_environment(process: ProcessRank, launch: str) -> ClusterEnvironment:
    """Return what tells Lightning the rank of this process, so that it does not guess.

    The ranks that `unet3d train` starts on this machine have the variables of torchrun.
    """
    if process.world_size == 1:
        return LightningEnvironment()
    return SLURMEnvironment(auto_requeue=False) if launch == "slurm" else TorchElasticEnvironment()


@contextmanager
def process_group(
    process: ProcessRank, *, launch: str, device: torch.device, timeout_seconds: float
) -> Generator[None]:
    """Join and leave the process group of a run; `timeout_seconds` applies to every collective.

    Lightning would create it when the training starts, but rank 0 prepares the data before.
    """
    if process.world_size == 1:
        yield
        return
    environment = choose_environment(process, launch)
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    try:
        with let_signals_end_process():  # it could not handle them until all ranks have joined
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
        if not is_communication_error(error):
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


def is_communication_error(error: RuntimeError) -> bool:
    """Return whether an error means that another rank has ended or hangs."""
    signs = ("gloo", "Connection closed by peer", "Timed out waiting")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


@contextmanager
def rank_zero_first(process: ProcessRank) -> Generator[None]:
    """Run the body on rank 0 first; the other ranks run it once rank 0 is done."""
    if process.rank > 0:
        wait_for_rank_zero("is prepared")
    yield
    if process.rank == 0 and process.world_size > 1:
        get_store().set("is prepared", "")


def run_on_rank_zero(process: ProcessRank, action: Callable[[], str]) -> str:
    """Return on every rank what `action` returns on rank 0."""
    if process.rank > 0:
        return os.fsdecode(wait_for_rank_zero("result"))
    result = action()
    if process.world_size > 1:
        value: Any = os.fsencode(result)  # a path may be any bytes
        get_store().set("result", value)
    return result


def wait_for_rank_zero(key: str) -> bytes:
    """Return what rank 0 stores, maybe hours later; Store.wait could not handle signals until then.

    If rank 0 has ended, so has its store, and the error says so.
    """
    store = get_store()
    while not store.check([key]):
        time.sleep(POLL_SECONDS)
    return store.get(key)


def get_store() -> dist.Store:
    """Return the key-value store of the process group."""
    return dist.distributed_c10d._get_default_store()


def share_buffers(model: nn.Module, world_size: int) -> None:
    """Give all ranks the statistics of rank 0, as in a checkpoint and in the next training step."""
    for buffer in model.buffers() if world_size > 1 else ():
        dist.broadcast(buffer, 0)


def gather_in_case_order(trainer: pl.Trainer, results: list[Any]) -> list[Any]:
    """Return the results of all ranks, which took the cases in turns, in the order of cases."""
    if trainer.world_size == 1:
        return results
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, results)
    longest = max(map(len, parts))
    return [part[n] for n in range(longest) for part in parts if n < len(part)]
