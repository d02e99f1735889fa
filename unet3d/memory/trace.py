"""Follow every tensor of a step on fake CPU tensors: allocated when, by which module, for how long.

No memory is taken and nothing is computed. The step runs under FakeTensorMode; a dispatch mode sees
each operation and keeps a list of events (allocate, free). Everything else that the meter says is
computed from that list.
"""

import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d.memory.allocator import round_block_size

aten = torch.ops.aten

COPIES_UNLESS_CONTIGUOUS = {
    aten.upsample_trilinear3d_backward,
    aten.upsample_nearest3d_backward,
    aten.max_pool3d_with_indices_backward,
}
"""Kernels that first make a contiguous copy of a gradient with gaps, on CUDA and on a CPU."""

BETWEEN = (__name__, "torch._compile", "torch._dynamo.eval_frame")
"""Modules whose frames lie between torch and what __torch_dispatch__ calls: torch wraps it."""


@dataclass(slots=True)
class Block:
    """One allocation; `born` and `died` count events, `died` is None while it lives."""

    id: int
    nbytes: int
    phase: str
    path: str  # of the module that made it
    op: str
    born: int
    kind: str | None = None  # if it is known at once: parameters, input, ...
    died: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the list of events: the call of a module, or a phase."""

    name: str
    type: str
    phase: str
    begun: int
    ended: int


class Trace(TorchDispatchMode):
    """Records a step; `phase` is set by whoever runs it."""

    def __init__(self, *, cuda: bool):
        super().__init__()
        self.cuda = cuda
        self.blocks: list[Block] = []
        self.events: list[int] = []  # block id + 1 where it is allocated, -(id + 1) where freed
        self.calls: list[Span] = []  # of modules without children
        self.phases: list[Span] = []
        self.workspaces: list[tuple[int, int]] = []  # (event, bytes): what cuDNN may take at most
        self.phase = "setup"
        self._phase_begun = 0
        self._live: dict[int, tuple[Block, weakref.ref]] = {}  # by the storage's address
        self._in_host: weakref.WeakSet = weakref.WeakSet()  # storages of pinned memory
        self._stack: list[str] = []
        self._begun: list[tuple[int, int, int]] = []  # event, autograd number, calls at the call
        self._called = 0
        self._paths: dict[nn.Module, str] = {}
        self._leaves: dict[str, str] = {}  # modules that called no other: path -> type
        self._node_paths: dict[int, str] = {}  # autograd's sequence number -> module
        self._last_path = ""
        self._made_before = 0  # autograd numbers nodes; a backward pass may make some of its own

    # What the one who runs the step tells.

    def begin_phase(self, phase: str) -> None:
        """End the phase that was and begin another."""
        self._end_backward_call()
        now = len(self.events)
        self.phases.append(Span(self.phase, "", self.phase, self._phase_begun, now))
        self.phase, self._phase_begun = phase, now
        self._made_before, self._last_path = _sequence_number(), ""

    def label(self, tensors: Any, kind: str) -> None:
        """Say what some tensors are; those not seen yet are allocated now."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._see(tensor, kind)
                block, _ = self._live[_address(tensor)]
                block.kind = kind

    def live_bytes(self) -> int:
        """Bytes of all blocks that are alive, as the device's allocator counts them."""
        sizes = (block.nbytes for block, _ in self._live.values())
        return sum(round_block_size(n) if n and self.cuda else n for n in sizes)

    @contextmanager
    def record(self, model: nn.Module) -> Generator["Trace"]:
        """Record while the body runs, with allocations attributed to the model's modules."""
        self._paths = {module: path or "model" for path, module in model.named_modules()}
        self.label(list(model.parameters()), "parameters")
        self.label(list(model.buffers()), "parameters")
        handles: list[Any] = [
            register_module_forward_pre_hook(self._call_begins),
            register_module_forward_hook(self._call_ends, always_call=True),
        ]
        for parameter in model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_is_done))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    # What torch tells.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is aten._local_scalar_dense.default:
            return _scalar(func, args)
        if func.overloadpacket is aten.arange and _short(args):
            known = _known_arange(func, args, kwargs)
            self._see(known, None, "arange")
            return known
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._stack:
            self._backward_call(self._path())
            if func is aten.add.Tensor and self._accumulates(args):
                # The engine adds a second gradient in place; under a dispatch mode it does not.
                return args[0].add_(args[1])
            if func is aten.view.default and _leads_to_a_changed_view():
                return self._through_the_storage(args[0], func(*args))
        out = func(*args, **kwargs)
        op = str(func.overloadpacket).removeprefix("aten.")
        if self.cuda and kwargs.get("pin_memory"):
            self._in_host.add(out.untyped_storage())
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor, None, op)
        self._hidden_copies(func.overloadpacket, args, out, op)
        if func.overloadpacket in (aten.convolution, aten.convolution_backward):
            self.workspaces.append((len(self.events), _workspace(args, out)))
        return out

    # Blocks.

    def _see(self, tensor: Tensor, kind: str | None, op: str = "") -> None:
        storage = tensor.untyped_storage()
        if storage in self._in_host:
            return
        address = storage._cdata
        known = self._live.get(address)
        if known is not None:
            if known[1]() is storage:
                return
            self._drop(address)  # freed in C++, and its address used again before we were told
        nbytes = storage.nbytes()
        block = self._allocate(nbytes, op)
        block.kind = kind

        def gone(reference: weakref.ref) -> None:
            held = self._live.get(address)
            if held is not None and held[1] is reference:
                self._drop(address)

        self._live[address] = (block, weakref.ref(storage, gone))

    def _allocate(self, nbytes: int, op: str) -> Block:
        recomputes = self.phase == "backward" and bool(self._stack)
        phase = "recompute" if recomputes else self.phase
        block = Block(len(self.blocks), nbytes, phase, self._path(), op, len(self.events))
        self.blocks.append(block)
        self.events.append(block.id + 1)
        return block

    def _free(self, block: Block) -> None:
        block.died = len(self.events)
        self.events.append(-(block.id + 1))

    def _drop(self, address: int) -> None:
        block, _ = self._live.pop(address)
        self._free(block)

    def _hidden_copies(self, operation: Any, args: tuple, out: Any, op: str) -> None:
        """What a kernel copies for itself and frees before it returns."""
        if operation in COPIES_UNLESS_CONTIGUOUS:
            nbytes = sum(
                t.numel() * t.element_size()
                for t in args
                if isinstance(t, Tensor)
                and t.dim() == 5
                and not t.is_contiguous()
                and not t.is_contiguous(memory_format=torch.channels_last_3d)
            )
            if nbytes:
                self._free(self._allocate(nbytes, f"{op}: contiguous copy"))
        elif operation is aten.sum and args[0].dtype != out.dtype:
            fused = args[0].dtype in (torch.float16, torch.bfloat16) and out.dtype == torch.float32
            if not (self.cuda and fused):  # labels and masks are summed as int64
                nbytes = args[0].numel() * out.element_size()
                self._free(self._allocate(nbytes, f"{op}: copy as {out.dtype}"))

    def _through_the_storage(self, grad: Tensor, as_view: Tensor) -> Tensor:
        """The gradient of a view that was changed in place, as AsStridedBackward makes it.

        autograd copies it into new memory, and the old is free if nobody else holds it. Fake
        tensors would go back through the view itself and copy nothing.
        """
        whole = torch.empty_like(as_view, memory_format=torch.contiguous_format)
        self._see(whole, None, "as_strided_backward")
        if _address(grad) in self._live and _held_alone(grad, tensors=5, storages=3):
            self._drop(_address(grad))  # torch keeps it as the base of what is returned here
        return whole

    def _accumulates(self, args: tuple) -> bool:
        """Whether this addition is the engine's, into a gradient that nobody else holds."""
        first, second = args[:2]
        if not _called_by_the_engine() or not isinstance(second, Tensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        held = self._live.get(_address(first))
        if held is None:
            return False
        block = held[0]
        storage = first.untyped_storage()
        return (
            block.phase in ("backward", "recompute")
            and block.kind is None
            and first._base is None
            and storage.nbytes() == first.numel() * first.element_size()
            and _held_alone(first, tensors=4, storages=2)
        )

    # Modules.

    def _path(self) -> str:
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        if number < self._made_before:  # else it is of the node before it, or adds up its gradients
            self._last_path = self._node_paths.get(number, "")
        return self._last_path

    def _call_begins(self, module: nn.Module, inputs: Any) -> None:
        if module in self._paths:
            self._stack.append(self._paths[module])
            self._called += 1
            self._begun.append((len(self.events), _sequence_number(), self._called))

    def _call_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in self._paths:
            return
        path, (begun, first_node, called) = self._stack.pop(), self._begun.pop()
        for number in range(first_node, _sequence_number()):
            self._node_paths.setdefault(number, path)  # a child has named its own already
        if called == self._called and self.phase == "forward":
            self._leaves[path] = type(module).__name__
            self.calls.append(Span(path, self._leaves[path], "forward", begun, len(self.events)))

    _call = ""  # the module whose backward runs
    _call_begun = 0

    def _backward_call(self, path: str) -> None:
        if path != self._call:
            self._end_backward_call()
            self._call, self._call_begun = path, len(self.events)

    def _end_backward_call(self) -> None:
        if self._call in self._leaves:
            kind, now = self._leaves[self._call], len(self.events)
            self.calls.append(Span(self._call, kind, "backward", self._call_begun, now))
        self._call = ""

    def _gradient_is_done(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.label(parameter.grad, "gradients")


def _sequence_number() -> int:
    """The number that autograd gives to the next node."""
    return torch._C._autograd._get_sequence_nr()  # ty: ignore[possibly-missing-submodule]


def _called_by_the_engine() -> bool:
    """Whether no Python code stands between this operation and the running backward pass."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in BETWEEN:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _held_alone(grad: Tensor, *, tensors: int, storages: int) -> bool:
    """Whether the engine alone holds a gradient: so many references are the dispatch's own."""
    count = grad._use_count()  # ty: ignore[missing-attribute]
    return count <= tensors and torch._C._storage_Use_Count(_address(grad)) <= storages


def _leads_to_a_changed_view() -> bool:
    """Whether the running node of autograd is a view's that was changed in place afterwards."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() != "ViewBackward0":
        return False
    before, _ = node.next_functions[0]
    return before is not None and before.name() == "torch::autograd::CopySlices"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _scalar(func: Any, args: tuple) -> Any:
    """`.item()` of a tensor without a value: the answer that lets a step go on."""
    try:
        return func(*args)
    except DataDependentOutputException:
        return False if args[0].dtype == torch.bool else 0


def _workspace(args: tuple, out: Any) -> int:
    """A generous guess at what cuDNN may use: channels-last copies of all a convolution has."""
    tensors = [t for t in (*args, *tree_leaves(out)) if isinstance(t, Tensor) and t.dim() == 5]
    return sum(t.numel() * t.element_size() for t in tensors)


def _short(args: tuple) -> bool:
    return all(isinstance(a, int) and abs(a) < 64 for a in args)


def _known_arange(func: Any, args: tuple, kwargs: dict) -> Any:
    """A short arange whose values may be asked for: some losses loop over them."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        real = func(*args, **{k: v for k, v in kwargs.items() if k == "dtype"})
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
