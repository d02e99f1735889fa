"""Find the rank of this process, or start the ranks of a run here, and let them end together.

Lightning's launcher and torchrun's do not keep what a run promises: the first makes rank 0 start
the others and ends it when one fails, the second turns every exit code into 1, prints a traceback
for each signal, and kills ranks that take longer than 30 seconds to save their checkpoint.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unet3d.control_groups import count_usable_cores
from unet3d.errors import Interrupted, RunError, UsageError
from unet3d.signals import STOP_SIGNALS, SignalListener

TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What Lightning's TorchElasticEnvironment reads, too; `unet3d train` sets them for its ranks."""

SLURM_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
"""What Lightning's SLURMEnvironment reads, too."""

POLL_SECONDS = 0.05

SETTLE_SECONDS = 2.0
"""Time for the other ranks to notice that one has failed, before they are sent SIGTERM."""

GRACE_SECONDS = 8.0  # time for them to end then, before they are killed

INTERRUPTED = {Interrupted(number).exit_code: number for number in STOP_SIGNALS}
"""The exit codes of ranks that were asked to stop."""


@dataclass(frozen=True)
class ProcessRank:
    """The global and local rank of a process, and the number of processes."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def detect_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher that started this process as one of several; None if there is none."""
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE", 1)) > 1:
        return "torchrun"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    return None


def read_process_rank(launch: str, environ: Mapping[str, str] = os.environ) -> ProcessRank:
    """Read this process's rank from the environment; without a launcher it is the only process."""
    detected = detect_launcher(environ)
    if detected not in (None, launch):
        raise UsageError(
            f"{detected} started {environ.get('WORLD_SIZE') or environ['SLURM_STEP_NUM_TASKS']} "
            f"processes, which would each train alone: add trainer={detected}"
        )
    needed = {"slurm": "SLURM_STEP_NUM_TASKS", "torchrun": "RANK"}  # a job script has the others
    if launch in needed and needed[launch] not in environ:
        program = "srun" if launch == "slurm" else "torchrun"
        raise UsageError(
            f"trainer={launch} needs processes started by {program}, one per GPU: "
            f"{program} unet3d train trainer={launch} output=..."
        )
    names = SLURM_NAMES if launch == "slurm" else TORCHRUN_NAMES
    if names[0] not in environ:
        return ProcessRank()
    return ProcessRank(*(int(environ.get(name, 1)) for name in names))


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
