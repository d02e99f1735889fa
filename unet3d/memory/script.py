"""Run the training step of a script on tensors without values, and follow its phases."""

import gc
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim import swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from unet3d.errors import UsageError
from unet3d.memory.cuda_kernels import FUNCTIONS, prefer
from unet3d.memory.estimate import MemoryEstimate, Step, trace_step
from unet3d.memory.fake_tensors import (
    OURS,
    TORCH,
    ReadNumber,
    SmallRangeMode,
    copy_fake,
    enable_foreach,
    replace,
)
from unet3d.memory.trace import Trace
from unet3d.types import HasRetention

Build = Callable[[], Callable[[], Any]]
"""Makes networks, losses and optimizers, and returns a function that takes a training step."""

MAX_CALLS = 64
"""Calls of a step in which every optimizer has to update its weights."""
NO_UPDATE = "made no update"
"""What a note says of an optimizer that does not."""

GPU = torch.device("cuda", 0)
"""Where a script finds its tensors while a GPU is simulated."""


def trace_script(build: Build, *, cuda: bool) -> MemoryEstimate:
    """Build a step as a script does, and trace it."""

    def make_step() -> ScriptStep:
        with SmallRangeMode():
            step = build()
        if not callable(step):
            raise UsageError(f"build must return a function that takes a step, got {step!r}")
        model, tensors, optimizers = find_fake()
        steps.append(ScriptStep(model, tensors, step, optimizers, cuda=cuda, reads=mode.reads))
        return steps[0]

    steps: list[ScriptStep] = []
    compiled, fused = list[Any](), set[str]()
    mode = ScriptMode(cuda=cuda)

    def follow(forward: Callable) -> Callable:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (self.training or torch.is_grad_enabled()):
                fused.add(type(self).__name__)
            return forward(self, *args, **kwargs)

        return run

    def skip_compile(model: Any = None, **options: Any) -> Any:
        compiled.append(model)
        if isinstance(model, nn.Module):
            use_plain_modules(model)
        return skip_compile if model is None else model

    # What is computed of short ranges has values, too, such as timm's drop rates; but not the
    # ranks of processes, whose steps are refused.
    is_alone = not (distributed.is_available() and distributed.is_initialized())
    with (
        replace(fake_tensor, "CONSTANT_NUMEL_LIMIT", lambda limit: 64 if is_alone else limit),
        mode,
        replace(nn.TransformerEncoderLayer, "forward", follow),
        replace(nn.MultiheadAttention, "forward", follow),
        replace(torch, "compile", lambda original: skip_compile),
        replace(nn.Module, "compile", lambda original: skip_compile),
        replace(nn.Module, "_apply", lambda apply: convert_fake),
        replace(torch, "save", ignore),  # over a file that has values
        replace(torch.cuda, "synchronize", ignore),
        replace(torch.cuda, "reset_peak_memory_stats", ignore),
        torch.inference_mode(False),
        torch.enable_grad(),
        replace(torch, "_is_all_true", lambda _: lambda valid: True),  # as torch.distributions ask
        replace(nn.init, "_no_grad_trunc_normal_", lambda init: lambda x, *_, **__: x),  # reads x
        use_cpu_autocast() if cuda else nullcontext(),
        show_gpu() if cuda else nullcontext(),
        replace(save_on_cpu, "__init__", use_host if cuda else lambda init: init),
    ):
        estimate = trace_step(make_step, cuda=cuda, validates=False)
    estimate.notes += steps[0].notes
    estimate.notes += [f"{n} is estimated without its fused evaluation" for n in sorted(fused)]
    if compiled:
        estimate.notes.append("compiled networks are estimated as plain modules")
    return estimate


def ignore(function: Callable) -> Callable[..., None]:
    """Return what does nothing in place of a function."""
    return lambda *_, **__: None


def use_plain_modules(model: nn.Module) -> None:
    """Take fused blocks apart, as they are compiled."""
    for module in model.modules():
        if isinstance(module, HasRetention):
            module.retention = None


@dataclass(eq=False)
class ScriptStep(Step):
    """A training step without arguments, whose phases torch announces.

    It is called until every optimizer has updated its weights, and as often again: scripts that
    accumulate gradients may do so in every n-th call.
    """

    model: nn.Module
    tensors: list[Tensor]  # made before the step, besides the model's
    step: Callable[[], Any]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    cuda: bool = False
    reads: dict[str, None] = field(default_factory=dict)  # lines that compare what has no value
    notes: list[str] = field(default_factory=list)
    calls: int = 0  # in which every optimizer updates its weights; 0: not known yet

    def train(self, trace: Trace) -> None:
        trace.reads = self.reads
        trace.label(self.tensors, "input")
        self.tensors = []
        gc.collect()  # storages that the last call has replaced, as by `p.data =`
        trace.begin_phase("forward")
        self.idle = list(self.optimizers)
        with self._follow_phases(trace):
            for n in range(self.calls or MAX_CALLS):
                self.step()
                if not (self.idle or self.calls):
                    self.calls = n + 1
                    break
        if self.idle:
            names = ", ".join(type(optimizer).__name__ for optimizer in self.idle)
            self.notes.append(
                f"{names} {NO_UPDATE} in {MAX_CALLS} calls: what it takes is left out, and "
                "backward if that did not run"
            )
        if any(isinstance(optimizer, torch.optim.SparseAdam) for optimizer in self.optimizers):
            self.notes.append("what SparseAdam computes with sparse gradients is not estimated")
        if not self.cuda and any(isinstance(x, torch.optim.ASGD) for x in self.optimizers):
            self.notes.append("ASGD is estimated as after its first t0 steps, when it averages")
        self.optimizers = []

    @contextmanager
    def _follow_phases(self, trace: Trace) -> Generator[None]:
        """Begin a phase where the body calls autograd or an optimizer, and continue after it."""
        running: list[str] = []

        def follow(engine: Callable) -> Callable:
            def run(*args: Any, **kwargs: Any) -> Any:
                if running:  # a checkpoint's recomputation, or another backward within
                    return engine(*args, **kwargs)
                running.append("backward")
                trace.begin_phase("backward")
                try:
                    return engine(*args, **kwargs)
                finally:
                    running.clear()
                    trace.begin_phase("forward")

            return run

        def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            trace.begin_phase("optimizer")
            if self.cuda:
                enable_foreach(optimizer)

        def after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.idle = [other for other in self.idle if other is not optimizer]
            trace.label(list(optimizer.state.values()), "optimizer state")
            trace.begin_phase(running[0] if running else "forward")

        with (
            replace(torch.autograd, "backward", follow),
            replace(torch.autograd, "grad", follow),
            register_optimizer_step_pre_hook(before_update),
            register_optimizer_step_post_hook(after_update),
        ):
            yield


def find_fake() -> tuple[nn.Module, list[Tensor], list[torch.optim.Optimizer]]:
    """Return the networks without values as one, other tensors, and optimizers that there are."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    objects = [x for n in (2, 1, 0) for x in gc.get_objects(n)]  # in the order of their making
    tensors = [x for x in objects if type(x) is FakeTensor and x.fake_mode is mode]
    fake = set(map(id, tensors))
    known = set(fake)
    modules = [
        x
        for x in objects
        if issubclass(type(x), nn.Module) and any(id(p) in known for p in x.parameters())
    ]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    model = roots[0] if len(roots) == 1 else nn.ModuleList(roots)
    known -= set(map(id, chain(model.parameters(), model.buffers())))
    optimizers = [
        x
        for x in objects
        if issubclass(type(x), torch.optim.Optimizer)
        and not isinstance(getattr(x, "optimizer", None), torch.optim.Optimizer)  # it wraps one
        and any(p in fake for group in x.param_groups for p in map(id, group["params"]))
    ]
    return model, [x for x in tensors if id(x) in known], optimizers


ON_GPU = {
    **{getattr(Tensor, n).__get__: n == "is_cuda" for n in ("is_cuda", "is_cpu")},
    Tensor.get_device: GPU.index,
}
"""What tensors on a GPU answer."""


def is_script() -> bool:
    """Return whether neither torch nor this package asks for what is known of tensors."""
    return not sys._getframe(2).f_code.co_filename.startswith((TORCH, OURS))


class HostGenerator(torch.Generator):
    """A generator on the CPU in place of a GPU."""

    def __new__(cls, device: Any = "cpu") -> "HostGenerator":
        make: Any = super().__new__
        return make(cls, replace_gpu(device))


@contextmanager
def show_gpu() -> Generator[None]:
    """Answer a script that there is a GPU, and that its tensors are there, in the body."""

    def make_device(known: Any) -> property:
        return property(lambda tensor: GPU if is_script() else known.fget(tensor))

    def make_answer(value: Any) -> Callable[[Callable], Callable]:
        return lambda ask: lambda *args, **kw: value if is_script() else ask(*args, **kw)

    with (
        replace(FakeTensor, "device", make_device),
        replace(torch.cuda, "is_available", make_answer(True)),
        replace(torch.cuda, "is_bf16_supported", make_answer(True)),
        replace(torch.cuda, "device_count", make_answer(1)),
        replace(torch.cuda, "current_device", make_answer(0)),
        replace(torch.accelerator, "is_available", make_answer(True)),
        replace(torch.accelerator, "current_accelerator", make_answer(GPU)),
        replace(swa_utils, "_get_foreach_kernels_supported_devices", lambda _: lambda: ["cpu"]),
        replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda _: lambda: False),
        replace(torch, "Generator", lambda _: HostGenerator),
    ):
        yield


FINITE = {torch.isfinite: True, torch.isnan: False, torch.isinf: False}
FINITE |= {getattr(Tensor, ask.__name__): answer for ask, answer in FINITE.items()}
"""What a script learns of a loss, by which it may skip the rest of a step."""


class ScriptMode(TorchFunctionMode):
    """Run what a script does with a GPU, and with values, on CPU tensors that have none."""

    def __init__(self, *, cuda: bool):
        self.cuda = cuda
        self.reads: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__format__:
            return format(0.0, args[1])
        if func is Tensor.numpy:  # of what a script logs, or decides by
            return make_array(args[0])
        if func is Tensor.item and is_script() and args[0].is_floating_point():
            has_value = getattr(args[0], "constant", None) is not None
            return func(*args) if has_value else ReadNumber(func(*args), self.reads)
        if func is Tensor.__deepcopy__:
            return copy_fake(*args)
        if func in FINITE and args and not args[0].dim():
            func(*args)
            return torch.tensor(FINITE[func])
        if self.cuda:
            if func in (Tensor.cuda, Tensor.pin_memory):
                return args[0]
            if func in ON_GPU and is_script():
                return ON_GPU[func]
            is_kept = func is torch._C._nn._parse_to  # LightningModule remembers the device
            if is_kept or (func is torch.device and is_script()):
                return func(*args, **kwargs)
            if func in FUNCTIONS:
                func = prefer(FUNCTIONS[func], func)
            args, kwargs = tree_map(replace_gpu, (args, kwargs))
        return func(*args, **kwargs)


def make_array(tensor: Tensor) -> np.ndarray:
    """Return an array of zeros; that a script reads whole numbers or conditions is recorded."""
    if not tensor.is_floating_point() and tensor.numel():
        with suppress(fake_tensor.DataDependentOutputException):  # before the step
            tensor.as_strided((), ()).item()
    return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))


def replace_gpu(value: Any) -> Any:
    """Return the CPU in place of a GPU."""
    is_device = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_device else value


def convert_fake(
    self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Do what `Module._apply` does; that of torch cannot swap parameters without values."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = fn(parameter)
                if parameter.grad is not None:
                    parameter.grad = fn(parameter.grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self


def use_host(init: Callable) -> Callable:
    """Return a `save_on_cpu.__init__` that keeps tensors in memory that is known as the host's."""

    def start(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        def pack(x: Tensor) -> Tensor:
            return torch.empty_like(x, pin_memory=True).copy_(x)

        saved_tensors_hooks.__init__(self, pack, Tensor.clone)

    return start


@contextmanager
def use_cpu_autocast() -> Generator[None]:
    """Cast on the CPU what a script casts on a GPU, and answer so, in the body."""
    half, is_enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled

    def make_start(init: Callable) -> Callable:
        def start(
            self: Any, device_type: str, dtype: Any = None, *rest: Any, **others: Any
        ) -> None:
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or half
            init(self, device_type, dtype, *rest, **others)

        return start

    def make_answer(ask: Callable) -> Callable:
        return lambda kind="cuda": ask("cpu" if kind == "cuda" else kind)

    def make_dtype(ask: Callable) -> Callable:
        answer = make_answer(ask)
        return lambda kind: half if kind == "cuda" and not is_enabled("cpu") else answer(kind)

    def make_cast(cast: Callable) -> Callable:
        return lambda value, kind, dtype: cast(value, "cpu" if kind == "cuda" else kind, dtype)

    with (
        replace(torch.autocast, "__init__", make_start),
        replace(torch, "is_autocast_enabled", make_answer),
        replace(torch, "get_autocast_dtype", make_dtype),
        replace(autocast_mode, "_cast", make_cast),  # of torch.amp.custom_fwd
    ):
        yield
