"""Apply a function to items in several processes at a time."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

import torch

from unet3d.errors import STOP_SIGNALS
from unet3d.machine import count_usable_cores

T = TypeVar("T")
R = TypeVar("R")

_work: tuple[Callable[[Any], Any], Sequence[Any]] | None = None
"""The function and its items, which forked processes inherit."""


def map_in_processes(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the results in order.

    The processes are forked, because importing torch takes seconds. Everything runs in this process
    where that is impossible, where torch finds a GPU, which forked processes cannot use, and where
    a backward has started threads of autograd, which they do not inherit.
    """
    global _work
    processes = min(count_usable_cores(), len(items))
    if processes < 2 or not hasattr(os, "fork") or torch.cuda.is_available():
        yield from map(function, items)
        return
    _work = (function, items)
    import_module("torch._dynamo")  # which fake tensors import, in each process otherwise
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _begin) as pool:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # threads are idle
            can_differentiate = pool.submit(_can_differentiate).result()
        yield from pool.map(_run, range(len(items))) if can_differentiate else map(function, items)


def _begin() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent stops them
    torch.set_num_threads(1)  # the threads of OpenMP are not inherited


def _can_differentiate() -> bool:
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _run(number: int) -> Any:
    assert _work is not None
    function, items = _work
    return function(items[number])
