"""List the Triton kernels that a training step launches, without running it."""

from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.custom_ops import OPERATORS
from unet3d.memory.estimate import Step, simulate_cuda_step
from unet3d.roofline.operations import OperationCounter, run_as_on_gpu
from unet3d.triton_kernels import Launch, collect_launches


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
    listener: Any = OperationCounter()  # which is not active: the step only needs a listener
    with FakeTensorMode(), simulate_cuda_step(), BodyRunner(), collect_launches() as launches:
        make_step().train(listener)
    return launches
