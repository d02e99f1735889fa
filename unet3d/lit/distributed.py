"""The processes of one run: how they meet, what they decide together, which one has gone silent."""

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from unet3d.errors import RunError
from unet3d.machine.distributed_env import Ranks, resolve_rendezvous

PULSE_SECONDS = 1.0
PREPARING = timedelta(days=30)
"""How long others wait while the first rank makes the data ready."""


class RankEnvironment(ClusterEnvironment):
    """Tells Lightning which process this is: it starts none, and looks for no other scheduler."""

    def __init__(self, ranks: Ranks):
        super().__init__()
        self.ranks = ranks

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
        return self.ranks.world

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.ranks.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.ranks.local

    def node_rank(self) -> int:
        return self.ranks.rank // self.ranks.per_node


class Ddp(DDPStrategy):
    """Without Lightning's own broadcast of signals before every batch: see signals.py."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


@contextmanager
def process_group(
    ranks: Ranks, *, launch: str, device: str, timeout_seconds: float
) -> Generator["HeartbeatThread | None"]:
    """The process group of a run; whoever waits longer for another rank than that gives up."""
    if ranks.world == 1:
        yield None
        return
    host, port = resolve_rendezvous(launch)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # for torch: that port is not torchrun's
    if device == "cuda":
        torch.cuda.set_device(ranks.local)
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            rank=ranks.rank,
            world_size=ranks.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise RunError(
            f"rank {ranks.rank} does not meet the others at {host}:{port}: {error}"
        ) from error
    pulse = HeartbeatThread(ranks)
    pulse.start()
    yield pulse
    dist.destroy_process_group()  # not after an error: it would wait for the others


class HeartbeatThread(threading.Thread):
    """Shows the other ranks that this process is alive: one that is stopped shows nothing.

    Once the process that started this one is gone, killed, nobody could stop the run or hear of it,
    and the next one would write into the same folder: then it asks its own process to leave.
    """

    def __init__(self, ranks: Ranks):
        super().__init__(daemon=True)
        self.ranks = ranks
        self.store = dist.distributed_c10d._get_default_store()
        self.answered = time.monotonic()  # when the store last did

    def run(self) -> None:
        watched = self.ranks.launcher is not None
        while dist.is_initialized():
            if watched and os.getppid() != self.ranks.launcher:
                watched = False
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                self.store.add(f"pulse/{self.ranks.rank}", 1)  # which waits for an answer
                self.answered = time.monotonic()
            except RuntimeError:
                return  # the first rank, which keeps the store, is gone
            time.sleep(PULSE_SECONDS)

    def find_unresponsive(self) -> str:
        """The other ranks that show nothing any more."""
        if time.monotonic() - self.answered > 3 * PULSE_SECONDS:
            return "rank 0"  # it keeps the store; to ask would be to wait with this one's pulse
        before = self._beats()
        time.sleep(3 * PULSE_SECONDS)
        after = self._beats()
        if before is None or after is None:
            return "rank 0"
        gone = [rank for rank in after if after[rank] == before[rank]]
        gone = [rank for rank in gone if rank != self.ranks.rank]
        if not gone:
            return "another rank"
        return f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}"

    def _beats(self) -> dict[int, bytes] | None:
        found = {}
        try:
            for rank in range(self.ranks.world):
                key = f"pulse/{rank}"
                found[rank] = self.store.get(key) if self.store.check([key]) else b""
        except RuntimeError:
            return None
        return found


@contextmanager
def rank_zero_first(ranks: Ranks) -> Generator[None]:
    """What the first rank does in here the others do after it, and find done."""
    if ranks.world == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    if ranks.rank > 0:
        store.wait(["ready"], PREPARING)
    yield
    if ranks.rank == 0:
        store.set("ready", "")


def any_rank(trainer: pl.Trainer, flag: bool) -> bool:
    """Whether it is so on any rank; every rank must ask at the same point."""
    if trainer.world_size == 1:
        return flag
    told = torch.tensor(int(flag), device=trainer.strategy.root_device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def gather_in_case_order(trainer: pl.Trainer, found: list[Any]) -> list[Any]:
    """What the ranks found in cases that they took in turns, in the order of the cases."""
    if trainer.world_size == 1:
        return found
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, found)
    longest = max(map(len, parts))
    return [part[n] for n in range(longest) for part in parts if n < len(part)]


def is_communication_error(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer."""
    if isinstance(error, dist.DistError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(
        word in said for word in ("gloo", "NCCL", "Connection closed by peer", "Timed out waiting")
    )
