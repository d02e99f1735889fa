"""The processes of a run: how ranks start and end together, their group, and what they share.

Lightning's launcher and torchrun's do not keep what a run promises: the first makes rank 0 start
the others and ends it when one fails, the second turns every exit code into 1, prints a traceback
for each signal, and kills ranks that take longer than 30 seconds to save their checkpoint.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
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
from torch import nn

from unet3d.control_groups import count_usable_cores
from unet3d.errors import DoesNotFitError, Interrupted, RunError, UsageError, summarize_error
from unet3d.machine import resolve_device
from unet3d.signals import STOP_SIGNALS, SignalListener, handle_stop_signals
from unet3d.training.config import TrainConfig
from unet3d.training.ranks import ProcessRank

POLL_SECONDS = 0.05

SETTLE_SECONDS = 2.0
"""Time for the other ranks to notice that one has failed, before they are sent SIGTERM."""

GRACE_SECONDS = 8.0  # time for them to end then, before they are killed

INTERRUPTED = {Interrupted(number).exit_code: number for number in STOP_SIGNALS}
"""The exit codes of ranks that were asked to stop."""

COMMUNICATION_ERRORS = ("gloo", "Connection closed by peer", "Timed out waiting")
"""What messages of torch hold when another rank has ended or hangs."""


def launch_ranks(overrides: Sequence[str], folder: Path, count: int) -> int:
    """Train as `count` ranks in one folder; return the exit code of the first that fails."""
    with SignalListener().listening() as signals:
        signals.defers_exit = True
        processes = start_ranks(overrides, folder, count)
        try:
            rank, code = wait_for_ranks(processes, signals)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if code in INTERRUPTED or -code in STOP_SIGNALS:
        interrupted = Interrupted(INTERRUPTED.get(code, -code))
        interrupted.is_reported = code > 0  # a rank that could not handle signals yet says nothing
        raise interrupted
    if code < 0:
        name = signal.Signals(-code).name
        raise RunError(f"rank {rank} was killed by {name}; rerun with resume=auto")
    return code


def start_ranks(overrides: Sequence[str], folder: Path, count: int) -> list[subprocess.Popen]:
    """Start each rank in a session of its own, so that only this process forwards Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    package = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-P", "-m", "unet3d", "train", *overrides]
    command += [f"hydra.run.dir={folder}"]
    environment = {
        "OMP_NUM_THREADS": str(max(1, count_usable_cores() // count)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch prints pages about a rank that has left
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    return [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(count)
    ]


def wait_for_ranks(
    processes: Sequence[subprocess.Popen], signals: SignalListener
) -> tuple[int, int]:
    """Forward signals until all ranks have ended; return the first that failed, and its exit code.

    The remaining ranks are ended. If several fail at once, it is one that was killed or
    interrupted: the others only report that they lost it.
    """
    first: tuple[int, int] | None = None
    terminate_at = kill_at = float("inf")
    while True:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed and first is None:
            first = min(failed, key=lambda item: (item[1] > 0, item[1] not in INTERRUPTED, item[1]))
            terminate_at = time.monotonic() + SETTLE_SECONDS
            if first[1] not in INTERRUPTED:  # or rank 0 may still be saving a checkpoint
                kill_at = terminate_at + GRACE_SECONDS
        if None not in codes or time.monotonic() > kill_at:
            return first or (0, 0)
        if time.monotonic() > terminate_at:
            signals.received = signal.SIGTERM
            terminate_at = float("inf")
        if signals.received is not None:
            for process in processes:
                process.send_signal(signals.received)
            signals.received = None
        time.sleep(POLL_SECONDS)


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
def join_process_group(
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
