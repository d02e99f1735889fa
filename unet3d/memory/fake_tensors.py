"""Run a step on fake CPU tensors as it runs on a GPU: with its dtypes, formats and host values."""

import copy
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeCopyMode,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.custom_ops import simulate_cuda
from unet3d.memory.autocast import use_cuda_autocast_rules
from unet3d.memory.cuda_kernels import KERNELS, prefer

aten = torch.ops.aten

TORCH, OURS = (
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
"""The folders of torch and of this package: other code is the user's."""


PARTS = torch._C.DispatchKey.CompositeImplicitAutograd
"""The key of operators that are made of others."""


@contextmanager
def simulate_cuda_step() -> Generator[None]:
    """Run a step on fake CPU tensors with the dtypes and operators that it has on CUDA."""
    with ExitStack() as stack:
        stack.enter_context(simulate_cuda())
        stack.enter_context(use_cuda_autocast_rules())
        for name, kernel in KERNELS.items():
            stack.enter_context(replace(nn.functional, name, partial(prefer, kernel)))
        yield


@contextmanager
def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Generator[None]:
    """Replace an attribute in the body by what `make` returns for it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def use_fake_tensors() -> Generator[FakeTensorMode]:
    """Make tensors without values in the body; torch 2.14 logs the errors that are raised there."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    with replace(logger, "disabled", lambda _: True), FakeTensorMode() as mode:
        yield mode


def enable_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of CPU tensors update them together, as torch does by default on CUDA."""
    if isinstance(optimizer, torch.optim.Adafactor):  # one by one, also there
        return
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def copy_as_fake(model: nn.Module) -> nn.Module:
    """Copy a network with parameters and buffers that have no values and are on the CPU."""
    memo: dict[int, Tensor] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        memo[id(tensor)] = fake
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with FakeCopyMode(mode):
        return copy.deepcopy(model, memo)


def run_parts(mode: TorchDispatchMode, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run what an operator is made of where it arrives whole, as it does in inference mode."""
    if not torch.is_inference_mode_enabled() or func.namespace != "aten":
        return NotImplemented
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), PARTS):
        return NotImplemented
    with mode:
        return func._op_dk(PARTS, *args, **kwargs)  # `decompose` has another dropout


def evaluate_on_host(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a device, a few numbers or the result of `.item()`; None where a kernel has to run."""
    if func is torch.ops.prim.device.default:
        return func(*args)
    if func is aten._local_scalar_dense.default:
        try:
            return func(*args)
        except DataDependentOutputException:  # without a value, the step continues with any
            return False if args[0].dtype == torch.bool else 0
    return make_short_range(func, args, kwargs)


def find_read(func: Any, args: tuple) -> str | None:
    """Return the line that reads a whole number or a condition that has no value, if it does."""
    if func is not aten._local_scalar_dense.default or args[0].is_floating_point():
        return None
    if getattr(args[0], "constant", None) is not None:
        return None
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((TORCH, OURS)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def make_short_range(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a few numbers with their values, which some networks and losses read; else None."""
    if func.overloadpacket is aten.linspace:
        is_short = len(args) > 2 and isinstance(args[2], int) and args[2] < 64
    else:
        is_range = func.overloadpacket is aten.arange
        is_short = is_range and all(isinstance(a, int) and abs(a) < 64 for a in args)
    if not is_short:
        return None
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        real = func(*args, **{k: v for k, v in kwargs.items() if k == "dtype"})
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


class SmallRangeMode(TorchDispatchMode):
    """Give short ranges their values in the body."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        numbers = make_short_range(func, args, kwargs)
        return func(*args, **kwargs) if numbers is None else numbers
