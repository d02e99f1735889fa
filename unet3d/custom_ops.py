"""Define operators that cost eager tensors only a function call, and choose their kernels.

Tensors on the CPU can stand for tensors on a GPU, to count what a step would need there.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

OPERATORS: dict[str, "CustomOp"] = {}
"""All operators by their qualified name."""

_is_simulating_cuda = False


class CustomOp:
    """An operator of torch.library; eager tensors that need no gradient go past the dispatcher.

    The dispatcher takes about 30 us for an operator that is written in Python, several times what a
    launch takes, and a step calls hundreds. Fake tensors, dispatch modes, torch.compile, function
    transforms and autograd need it.
    """

    def __init__(self, name: str, body: Callable[..., Any], mutates_args: Iterable[str] = ()):
        self.body = body
        self.op = torch.library.custom_op(name, body, mutates_args=tuple(mutates_args))
        self.register_fake = self.op.register_fake  # what it returns for tensors without values
        self.register_autograd = self.op.register_autograd
        self.list_temporaries: Callable[..., list[int]] = lambda *args: []
        update_wrapper(self, body)
        OPERATORS[name] = self

    def __call__(self, *args: Any) -> Any:
        return self.body(*args) if is_eager(args) else self.op(*args)

    def register_temporaries(self, function: Callable[..., list[int]]) -> None:
        """Register the bytes of the tensors that the CUDA kernels allocate and free in a call."""
        self.list_temporaries = function


def custom_op(name: str, *, mutates_args: Iterable[str] = ()) -> Callable[..., CustomOp]:
    """Return a decorator that defines an operator from its implementation."""
    return lambda body: CustomOp(name, body, mutates_args)


def is_eager(args: Iterable[Any]) -> bool:
    """Return whether an operator's body may run on these arguments as it is."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    tensors = [x for x in args if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def is_transformed() -> bool:
    """Return whether torch.func transforms, or torch.jit.trace records, what runs."""
    if torch.compiler.is_compiling():
        return False
    return torch.jit.is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def simulate_cuda() -> Generator[None]:
    """Make CPU tensors stand for CUDA tensors within the body, which runs on fake tensors."""
    global _is_simulating_cuda
    previous, _is_simulating_cuda = _is_simulating_cuda, True
    try:
        yield
    finally:
        _is_simulating_cuda = previous


def get_device_type(x: Tensor) -> str:
    """Return the type of the device that a tensor is on, or stands for."""
    return "cuda" if _is_simulating_cuda else x.device.type


def upcast(x: Tensor) -> Tensor:
    """Cast to float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_metadata(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return tensors that a function computes; of MONAI's MetaTensor, with its metadata."""
    if not hasattr(x, "copy_meta_from"):
        return function(x)

    def restore(y: Any) -> Any:
        y = y.as_subclass(type(x))
        y.copy_meta_from(x)
        return y

    return tree_map(restore, function(x.as_subclass(Tensor)))
