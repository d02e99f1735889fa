"""The processes of a distributed run: process group, joint decisions, heartbeat."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from unet3d.errors import RunError, UsageError
from unet3d.lit.lightning_internals import disable_sigterm_broadcast
from unet3d.machine.distributed_env import ProcessRank, resolve_rendezvous
from unet3d.stop_signals import let_signals_end_process

HEARTBEAT_SECONDS = 1.0
UNRESPONSIVE_FRACTION = 0.8
"""Part of the timeout of collectives after which an unresponsive rank ends the run."""
EXIT_CODE = 4  # of errors other than usage and memory
PREPROCESSING_TIMEOUT = timedelta(days=30)
"""How long other ranks wait while rank 0 preprocesses the data."""


class RankEnvironment(ClusterEnvironment):
    """Tell Lightning the rank of this process, so that it neither detects nor starts others."""

    def __init__(self, process: ProcessRank):
        super().__init__()
        self.process = process

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.process.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.process.gpu_index

    def node_rank(self) -> int:
        return self.process.rank // self.process.visible_devices


class DDPWithoutSigtermBroadcast(DDPStrategy):
    """DDP without Lightning's broadcast of signals before every batch: callbacks/preemption.py."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        disable_sigterm_broadcast(trainer)


@contextmanager
def process_group(
    process: ProcessRank, *, launch: str, device: str, timeout_seconds: float
) -> Generator["HeartbeatThread | None"]:
    """Join and leave the process group of a run; `timeout_seconds` applies to every collective."""
    if process.world_size == 1:
        yield None
        return
    host, port = resolve_rendezvous(launch)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the port is ours, not torchrun's
    if device == "cuda":
        torch.cuda.set_device(process.gpu_index)
    try:
        with let_signals_end_process():  # it could not handle them until all ranks have joined
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                rank=process.rank,
                world_size=process.world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
    except RuntimeError as error:
        raise RunError(
            f"rank {process.rank} could not join the process group at {host}:{port}: {error}"
        ) from error
    heartbeat = HeartbeatThread(process)
    heartbeat.start()
    UnresponsiveRankWatcher(heartbeat, UNRESPONSIVE_FRACTION * timeout_seconds).start()
    yield heartbeat
    leave_process_group()  # not after an error: it would wait for the other ranks


def leave_process_group() -> None:
    """Leave the process group, if there is one, once all ranks are ready to."""
    if dist.is_initialized():
        is_nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if is_nccl else None)
        dist.destroy_process_group()


class HeartbeatThread(threading.Thread):
    """Show the other ranks that this process is alive, and note when they last did.

    If the process that launched it has been killed, nobody could stop the run, and the next one
    would write into the same folder: then the thread sends SIGTERM to its own process.
    """

    def __init__(self, process: ProcessRank):
        super().__init__(daemon=True)
        self.process = process
        self.store = dist.distributed_c10d._get_default_store()
        self.answered = time.monotonic()  # when the store last answered
        self.beats = dict.fromkeys(range(process.world_size), b"")  # the last one of each rank
        self.heard = dict.fromkeys(range(process.world_size), self.answered)  # when it changed

    def run(self) -> None:
        has_launcher = self.process.launcher_pid is not None
        while dist.is_initialized():
            if has_launcher and os.getppid() != self.process.launcher_pid:
                has_launcher = False
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                self.store.add(f"heartbeat/{self.process.rank}", 1)  # waits for an answer
                self._listen()
                self.answered = time.monotonic()
            except RuntimeError:
                return  # rank 0, which hosts the store, has exited
            time.sleep(HEARTBEAT_SECONDS)

    def wait_for_unresponsive(self) -> str:
        """Wait for three heartbeats; return the ranks without one, as text for a message."""
        time.sleep(3 * HEARTBEAT_SECONDS)
        return self.find_unresponsive(3 * HEARTBEAT_SECONDS) or "another rank"

    def find_unresponsive(self, seconds: float) -> str:
        """Return the ranks without a heartbeat for so long, as text; empty if there are none."""
        now = time.monotonic()
        if now - self.answered > seconds:
            return "rank 0"  # it hosts the store; nothing is known of the others
        ranks = [rank for rank, heard in self.heard.items() if now - heard > seconds]
        if not ranks:
            return ""
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

    def _listen(self) -> None:
        for rank in range(self.process.world_size):
            key = f"heartbeat/{rank}"
            beat = self.store.get(key) if self.store.check([key]) else b""
            if beat != self.beats[rank]:
                self.beats[rank], self.heard[rank] = beat, time.monotonic()


class UnresponsiveRankWatcher(threading.Thread):
    """End this process if another rank is unresponsive for so long that collectives will time out.

    After the timeout of a collective, NCCL aborts the process without a Python exception: nobody
    would learn which rank was unresponsive, and the launcher would name a responsive one.
    """

    def __init__(self, heartbeat: HeartbeatThread, seconds: float):
        super().__init__(daemon=True)
        self.heartbeat, self.seconds = heartbeat, seconds

    def run(self) -> None:
        while dist.is_initialized():
            ranks = self.heartbeat.find_unresponsive(self.seconds)
            if ranks and dist.is_initialized():
                line = f"unet3d: {ranks} stopped responding; rerun with resume=auto\n"
                os.write(2, line.encode())
                os._exit(EXIT_CODE)
            time.sleep(HEARTBEAT_SECONDS)


@contextmanager
def rank_zero_first(process: ProcessRank) -> Generator[None]:
    """Run the body on rank 0 first; the other ranks run it once rank 0 is done."""
    if process.world_size == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    if process.rank > 0:
        store.wait(["ready"], PREPROCESSING_TIMEOUT)
    yield
    if process.rank == 0:
        store.set("ready", "")


def run_on_rank_zero(process: ProcessRank, action: Callable[[], str]) -> str:
    """Return on every rank what `action` returns on rank 0; if it raises, every rank ends."""
    if process.world_size == 1:
        return action()
    store = dist.distributed_c10d._get_default_store()
    if process.rank > 0:
        store.wait(["result"], PREPROCESSING_TIMEOUT)
        is_error, _, text = os.fsdecode(store.get("result")).partition(" ")
        if is_error == "error":
            raise UsageError(text)
        return text

    def set_result(text: str) -> None:
        value: Any = os.fsencode(text)  # a path may be any bytes
        store.set("result", value)

    try:
        result = action()
    except Exception as error:
        set_result(f"error {error}")
        raise
    set_result(f"ok {result}")
    return result


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


def is_communication_error(error: BaseException) -> bool:
    """Return whether an error means that another rank stopped responding."""
    if isinstance(error, dist.DistError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(
        phrase in message
        for phrase in ("gloo", "NCCL", "Connection closed by peer", "Timed out waiting")
    )
