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

MADE_OF_OTHERS = {
    aten._trilinear: torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
    aten._euclidean_dist: torch._C.DispatchKey.CompositeExplicitAutograd,
    aten.dist: torch._C.DispatchKey.CompositeExplicitAutograd,
    aten.linalg_pinv: torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
}
"""Operators that are one to tensors without values, though their parts allocate memory."""


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


def copy_fake(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Copy a tensor without its mode, which torch would copy too.

    As torch does, copy a parameter, but of other tensors the whole storage, once for all its views.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    else:
        storage = tensor.untyped_storage()
        storages = memo.setdefault("torch", {})
        if storage._cdata not in storages:
            numel = storage.nbytes() // tensor.element_size()
            storages[storage._cdata] = torch.empty(numel, dtype=tensor.dtype)
        torch.empty((), dtype=tensor.dtype)  # torch lets it take over the storage
        whole = storages[storage._cdata].view(tensor.dtype)
        copy = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        copy.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = copy_fake(tensor.grad, memo)
    memo[id(tensor)] = copy
    return copy


def run_parts(mode: TorchDispatchMode, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run what an operator is made of where it arrives whole, as all do in inference mode."""
    operation = func.overloadpacket
    if operation is aten.roll and len(args) > 2 and len(args[2]) > 1:  # axis by axis
        with mode:
            for shift, axis in zip(*args[1:], strict=True):
                args = func(args[0], [shift], [axis]), *args[1:]
        return args[0]
    if operation in MADE_OF_OTHERS:
        with mode:
            return func._op_dk(MADE_OF_OTHERS[operation], *args, **kwargs)
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
    return None if getattr(args[0], "constant", None) is not None else find_line()


def find_line() -> str:
    """Return the file and the line that runs, outside of torch and this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((TORCH, OURS)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class ReadNumber(float):
    """A number without a value that a script reads of a tensor; lines that compare it are kept."""

    lines: dict[str, None]

    def __new__(cls, value: float, lines: dict[str, None]) -> "ReadNumber":
        number = super().__new__(cls, value)
        number.lines = lines
        return number

    __hash__ = float.__hash__

    def __copy__(self) -> "ReadNumber":
        return self

    def __deepcopy__(self, memo: Any) -> "ReadNumber":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def _follow(name: str, *, compares: bool) -> Callable[..., Any]:
    method = getattr(float, name)

    def run(self: ReadNumber, *others: Any) -> Any:
        if compares:
            self.lines[find_line()] = None
        try:
            result = method(self, *others)
        except ZeroDivisionError:
            result = 0.0
        return ReadNumber(result, self.lines) if type(result) is float else result

    return run


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs"):
    setattr(ReadNumber, f"__{_name}__", _follow(f"__{_name}__", compares=False))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(ReadNumber, f"__{_name}__", _follow(f"__{_name}__", compares=True))


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
