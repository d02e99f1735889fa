"""Count what a step asks of a GPU: kernel launches, and operations that the host waits for.

The step runs on fake tensors, where a dispatch mode sees each operation.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d.custom_ops import OPERATORS
from unet3d.memory.cuda_libraries import follow_cudnn
from unet3d.memory.estimate import Step
from unet3d.memory.fake_tensors import evaluate_on_host, simulate_cuda_step
from unet3d.step.training_step import NullListener

FREE = frozenset(
    """alias as_strided chunk detach detach_ device empty empty_like empty_strided expand
    is_pinned is_same_size movedim narrow new_empty new_empty_strided numel permute promote_types
    reshape scalar_tensor select set_ slice split split_with_sizes squeeze t transpose unbind
    unflatten unsafe_split unsqueeze view view_as _reshape_alias _unsafe_view prim::device
    profiler::_record_function_enter_new profiler::_record_function_exit""".split()
)
"""Operations that launch nothing: views, and tensors without or with one value on the host."""

WAITS = frozenset({"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique"})
"""Operations that make the host wait for the GPU: they read from it, or copy from pageable memory.

`lift_fresh` comes from `torch.tensor` and `Tensor.new_tensor`, which copy numbers to the device.
"""

KERNELS = [f"unet3d.{package}.kernels.cuda" for package in ("pool", "loss", "model.fused")]

FOREACH_TENSORS = 60
"""Tensors that one launch of a `_foreach` or `_fused` operation takes, approximately."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step."""

    name: str
    launches: int

    @property
    def waits(self) -> bool:
        """Return whether the host waits for the GPU."""
        return self.name in WAITS


class OperationCounter(TorchDispatchMode, NullListener):
    """Lists the operations of a step; the code that runs the step sets the phase."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.phase = ""

    def begin_phase(self, phase: str) -> None:
        """Note that a phase begins."""
        self.phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer, name = evaluate_on_host(func, args, kwargs), get_name(func)
        out = follow_cudnn(func, args, func(*args, **kwargs)) if answer is None else answer
        if name not in FREE and not self._is_on_host(args):
            self.operations.append(Operation(name, count_launches(func, name, args)))
        return out

    def _is_on_host(self, args: tuple) -> bool:
        """Return whether an operation counts an optimizer's steps, whose tensors stay there."""
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        return self.phase == "optimizer" and bool(tensors) and not any(x.dim() for x in tensors)


def get_name(func: Any) -> str:
    """Return the name of an operation, without `aten::` and without its overload."""
    return func._schema.name.removeprefix("aten::")


def count_launches(func: Any, name: str, args: tuple) -> int:
    """Return the number of kernels that an operation launches."""
    if operator := OPERATORS.get(func._schema.name):  # ours: its own kernels, and torch's
        with ExitStack() as stack, OperationCounter() as inner:
            launches = [stack.enter_context(patch(f"{module}.launch")) for module in KERNELS]
            operator.body(*args)
        return sum(launch.call_count for launch in launches) + sum_launches(inner.operations)
    if name in WAITS:
        return int(name != "lift_fresh")
    if name == "convolution_backward":
        return sum(args[-1])  # gradients of input, weight and bias
    if name.startswith(("_foreach", "_fused")):
        tensors = len(args[0]) if isinstance(args[0], list | tuple) else 1
        return max(1, -(-tensors // FOREACH_TENSORS))
    return 1


def count_operations(make_step: Callable[[], Step]) -> list[Operation]:
    """Return the operations of a steady training step on a GPU."""
    with FakeTensorMode(), simulate_cuda_step():
        step = make_step()
        counter: Any = OperationCounter()
        with OperationCounter():
            step.train(counter)  # the first step allocates the optimizer's state
        with counter:
            step.train(counter)
    return counter.operations


def sum_launches(operations: Iterable[Operation]) -> int:
    """Return the number of kernels that the operations launch."""
    return sum(operation.launches for operation in operations)
