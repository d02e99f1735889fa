"""One run as several processes on this machine: start them, watch them, end them together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from unet3d.errors import Interrupted, RunError
from unet3d.lit.callbacks.preemption import HEARD
from unet3d.machine.distributed_env import LAUNCHER

GRACE_SECONDS = 8.0
"""How long the others may take to leave once one has failed."""

PACKAGE = Path(__file__).resolve().parents[2]


def launch_ranks(words: Sequence[str], folder: Path, count: int) -> int:
    """Train as `count` ranks in one folder; the first to fail ends all, and is named."""
    heard: list[int] = []
    before = {number: signal.signal(number, lambda n, _: heard.append(n)) for number in HEARD}
    processes = start_ranks(words, folder, count)
    try:
        return wait_for_ranks(processes, heard)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def start_ranks(words: Sequence[str], folder: Path, count: int) -> list[subprocess.Popen]:
    """Each in a session of its own, so that Ctrl-C comes from here alone, once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "unet3d.cli.main", "train", *words]
    command += [f"hydra.run.dir={folder}"]
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    common = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a rank that is gone is worth a line, no more
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
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(count)
    ]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP or the like and not continued."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it is gone, or this is not Linux
        return False


def wait_for_ranks(processes: Sequence[subprocess.Popen], heard: list[int]) -> int:
    """Hand signals on; wait for all, or for a while once one has failed."""
    stop: int | None = None
    failed: tuple[int, int] | None = None  # rank and exit code of the first
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        while heard:
            stop = heard.pop(0)
            for process in processes:
                process.send_signal(stop)
        for rank, process in enumerate(processes):
            if failed is None and process.poll():
                failed, deadline = (rank, process.returncode), time.monotonic() + GRACE_SECONDS
                if -process.returncode in HEARD:  # it had not begun to listen, and others wait
                    heard.append(-process.returncode)
            if failed is not None and is_stopped(process.pid):
                process.kill()  # it will not leave by itself
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for rank, code in enumerate(codes):
        if failed is None and code:
            failed = rank, code
    if failed is None:
        return 0
    rank, code = failed
    asked = {Interrupted(number).exit_code: number for number in HEARD} | {-n: n for n in HEARD}
    if code in asked:
        raise Interrupted(stop or asked[code])
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    elif code in (2, 3):
        return code  # it has said why
    else:
        how = f"ended with exit code {code}"
    raise RunError(f"rank {rank} {how}, and so the run ended; resume=auto goes on")
