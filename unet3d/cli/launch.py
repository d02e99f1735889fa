"""Run several ranks on this machine: start them, wait for them, and end them together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from unet3d.errors import STOP_SIGNALS, Interrupted, ReportedUsageError, RunError
from unet3d.machine.distributed_env import LAUNCHER
from unet3d.machine.system import count_usable_cores
from unet3d.stop_signals import drop_ignored

GRACE_SECONDS = 8.0
"""Time for the other ranks to leave once one has failed."""

PACKAGE = Path(__file__).resolve().parents[2]


def launch_ranks(overrides: Sequence[str], folder: Path, count: int) -> int:
    """Train as `count` ranks in one folder.

    The first rank that fails ends all of them; the error says which it was.
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: received.append(n))
        for number in drop_ignored(STOP_SIGNALS)
    }
    processes = start_ranks(overrides, folder, count)
    try:
        return wait_for_ranks(processes, received)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def start_ranks(overrides: Sequence[str], folder: Path, count: int) -> list[subprocess.Popen]:
    """Start each rank in a session of its own, so that only this process forwards Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "unet3d.cli.main", "train", *overrides]
    command += [f"hydra.run.dir={folder}"]
    threads = max(1, count_usable_cores() // count)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch prints pages about a rank that left
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        LAUNCHER: str(os.getpid()),
    }
    return [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(count)
    ]


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped, by SIGSTOP or the like, and not continued."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "T"
    except OSError:  # the process is gone, or this is not Linux
        return False


def wait_for_ranks(processes: Sequence[subprocess.Popen], received: list[int]) -> int:
    """Forward signals; wait for all ranks, or GRACE_SECONDS once one has failed."""
    stop: int | None = None
    failed: tuple[int, int] | None = None  # rank and exit code of the first
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        while received:
            stop = received.pop(0)
            for process in processes:
                process.send_signal(stop)
        for rank, process in enumerate(processes):
            if failed is None and process.poll():
                failed, deadline = (rank, process.returncode), time.monotonic() + GRACE_SECONDS
                # A rank that did not handle signals yet was killed by one: the others get it, too.
                if -process.returncode in STOP_SIGNALS:
                    received.append(-process.returncode)
            if failed is not None and is_stopped(process.pid):
                process.kill()  # a stopped process does not leave
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for rank, code in enumerate(codes):
        if failed is None and code:
            failed = rank, code
    if failed is None:
        return 0
    rank, code = failed
    interruptions = {Interrupted(number).exit_code: number for number in STOP_SIGNALS} | {
        -n: n for n in STOP_SIGNALS
    }
    if code in interruptions:
        interrupted = Interrupted(stop or interruptions[code])
        interrupted.is_reported = True  # by the ranks
        raise interrupted
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    elif code == 2:
        raise ReportedUsageError(f"rank {rank} was refused")  # it has printed why
    elif code == 3:
        return code  # the rank has printed why
    elif code == 4:
        how = "reported the error above"  # which may name another rank
    else:
        how = f"exited with code {code}"
    raise RunError(f"rank {rank} {how}, which ended the run; rerun with resume=auto")
