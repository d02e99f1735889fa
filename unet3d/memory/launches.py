"""List the Triton kernels that a training step launches, without running it."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.custom_ops import OPERATORS
from unet3d.memory.cuda_libraries import follow_cudnn
from unet3d.memory.estimate import Step, simulate_cuda_step
from unet3d.memory.trace import Trace, is_short_range, range_with_values, read_scalar
from unet3d.triton_kernels import Launch, collect_launches

aten = torch.ops.aten


def run_as_on_gpu(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation on fake CPU tensors, with the result that it has on a GPU."""
    if func is torch.ops.prim.device.default:
        return func(*args)
    if func is aten._local_scalar_dense.default:
        return read_scalar(func, args)
    if is_short_range(func, args):
        return range_with_values(func, args, kwargs)
    return follow_cudnn(func, args, func(*args, **kwargs))


class BodyRunner(TorchDispatchMode):
    """Runs the implementation of our operators, too: fake tensors need only what they return."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = run_as_on_gpu(func, args, kwargs or {})
        operator = OPERATORS.get(func._schema.name)
        if operator is not None:
            operator.body(*args)
        return out


def list_launches(make_step: Callable[[], Step]) -> list[Launch]:
    """Return the launches of our Triton kernels in a step on a GPU."""
    with FakeTensorMode(), simulate_cuda_step(), BodyRunner(), collect_launches() as launches:
        make_step().train(Trace(cuda=True))  # which is not active: the step only needs one
    return launches
