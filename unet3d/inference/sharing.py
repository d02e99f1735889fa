"""Share scans among processes: one per GPU, or several on a CPU."""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from unet3d.errors import Interrupted, RunError, SignalListener, UsageError
from unet3d.inference.predictor import USABLE_FRACTION
from unet3d.machine import get_available_bytes, resolve_device

Result = TypeVar("Result")

Work = Callable[[tuple[int, int], int | None], Result]
"""Segments a share (n, count) of the scans, every count-th from the n-th on, within some RAM."""


def count_processes(device: str, devices: int | None) -> int:
    """Return how many processes share the scans; None: one per GPU."""
    has_gpu = resolve_device(device, "device") == "cuda"
    num_gpus = torch.cuda.device_count() if has_gpu else None
    if devices is None:
        return num_gpus or 1
    if num_gpus is not None and devices > num_gpus:
        raise UsageError(f"devices={devices}, but there are {num_gpus} GPUs")
    return devices


def run_in_processes(
    work: Work[Result], count: int, device: str, *, ram: int | None
) -> list[Result]:
    """Call `work` in `count` processes, each with its share of the scans and of the RAM.

    An error of a process, not of one of its scans, is raised when the others have ended.
    """
    if ram is None and (free := get_available_bytes(torch.device("cpu"))) is not None:
        ram = int(USABLE_FRACTION * free)
    context, processes, pipes = get_context("spawn"), [], []
    threads = max(1, torch.get_num_threads() // count)
    try:
        for n in range(count):
            share = (n, count), None if ram is None else ram // count
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_share, args=(work, share, device, threads, sender), daemon=True
            )
            process.start()
            sender.close()  # or the death of the process would not end the pipe
            processes.append(process)
            pipes.append(receiver)
        results = [_receive(pipe) for pipe in pipes]
    except BaseException:
        for process in processes:
            process.terminate()  # it removes what it has half written
        raise
    finally:
        for process in processes:
            process.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _receive(pipe: Connection) -> Any:
    """Return the result of a process, or its error."""
    try:
        return pipe.recv()
    except EOFError:
        return RunError(
            "a process of devices= ended before its scans were done, perhaps because the machine "
            "is out of memory; run the same command again for those that are left"
        )


def _run_share(
    work: Work[Any],
    share: tuple[tuple[int, int], int | None],
    device: str,
    threads: int,
    sender: Connection,
) -> None:
    """Work on a share of the scans, in a process of its own."""
    try:
        with SignalListener().listening():
            if resolve_device(device, "device") == "cuda":
                torch.cuda.set_device(share[0][0])
            else:
                torch.set_num_threads(threads)
            sender.send(work(*share))
    except (Interrupted, KeyboardInterrupt):
        pass
    except Exception as error:
        sender.send(error)
