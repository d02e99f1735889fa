"""Trace every allocation of a step on fake tensors: when, by which module, and for how long.

The step runs under FakeTensorMode: no memory is allocated and nothing is computed. A dispatch mode
sees each operation and records a list of events (allocate, free), from which the estimate follows.
"""

import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d.custom_ops import OPERATORS
from unet3d.memory.allocator import round_block_size
from unet3d.memory.autograd import (
    add_bag_numbers,
    adds_to_new_tensor,
    find_makers,
    find_other_formula,
    get_sequence_number,
    is_called_by_engine,
    is_unshared,
    leads_to_modified_view,
)
from unet3d.memory.cuda_libraries import (
    COLUMNS,
    CONVOLUTIONS,
    CUBLASLT_BYTES,
    MATRIX_PRODUCTS,
    follow_cudnn,
    get_backward_workspaces,
    get_column_bytes,
    get_cublas_bytes,
    get_forward_workspace,
    is_dense,
)
from unet3d.memory.events import Block, EventRange, OpenCall
from unet3d.memory.fake_tensors import evaluate_on_host, find_read, run_parts
from unet3d.memory.temporaries import find_kept_bytes, list_temporaries

aten = torch.ops.aten

FUSED_OPTIMIZERS = {getattr(aten, f"_fused_{n}_") for n in ("adagrad", "adam", "adamw", "sgd")}


class Trace(TorchDispatchMode):
    """Records a step; the code that runs the step sets the phase."""

    def __init__(self, *, cuda: bool):
        super().__init__()
        self.cuda = cuda
        self.blocks: list[Block] = []
        self.events: list[int] = []  # block id + 1 where it is allocated, -(id + 1) where freed
        self.calls: list[EventRange] = []  # of leaf modules
        self.phases: list[EventRange] = []
        self.graph_pool: list[range] = []  # events in the memory pool of CUDA graphs
        self.weights: dict[int, int] = {}  # numel of a weight, by the workspace of its gradient
        self.reads: dict[str, None] = {}  # lines that read values which decide what runs
        self.obstacle: Exception | None = None  # what a step cannot do without values
        self.formulas: dict[tuple[str, str], None] = {}  # see autograd.OTHER_FORMULAS
        self._stream = "default"
        # What has a workspace of cuBLAS: threads and cuBLASLt, for each stream.
        self._cublas_users: set[tuple[str, str]] = set()
        self.phase = "setup"
        self._phase_start = 0
        self._live: dict[int, tuple[Block, weakref.ref]] = {}  # by address of the storage
        self._in_host: weakref.WeakSet = weakref.WeakSet()  # storages in pinned memory
        self._stack: list[OpenCall] = []
        self._leaves: dict[str, str] = {}  # path -> type of modules that called no other
        self._node_paths: dict[int, str] = {}  # sequence number of an autograd node -> module path
        self._last_path = ""
        self._call, self._call_start = "", 0  # path of the module whose backward runs
        self._node, self._node_start = -1, 0  # the running node, and the event at which it began
        self._num_forward_nodes = 0  # later numbers are nodes that backward itself created

    # Called by the code that runs the step.

    def begin_phase(self, phase: str) -> None:
        self._end_backward_call()
        now = len(self.events)
        self.phases.append(EventRange(self.phase, "", self.phase, self._phase_start, now))
        self.phase, self._phase_start = phase, now
        self._num_forward_nodes, self._last_path = get_sequence_number(), ""

    def label(self, tensors: Any, kind: str) -> None:
        """Set the kind of tensors; those not seen before are allocated now."""
        self._see(tensors, "")
        for tensor in _list_dense(tensors):
            self._live[_address(tensor)][0].kind = kind

    def count_live_bytes(self) -> int:
        """Return the bytes of all live blocks, rounded as the device's allocator rounds."""
        sizes = (block.nbytes for block, _ in self._live.values())
        return sum(round_block_size(n) if self.cuda else n for n in sizes)

    @contextmanager
    def use_graph_pool(self) -> Generator[None]:
        """Allocate from the memory pool and on the stream of CUDA graphs."""
        before, self._stream = self._stream, "graph"
        start = len(self.events)
        yield
        self.graph_pool.append(range(start, len(self.events)))
        self._stream = before

    @contextmanager
    def record(self, model: nn.Module) -> Generator["Trace"]:
        """Record while the body runs, and attribute allocations to the model's modules."""
        self.label([*model.parameters(), *model.buffers()], "parameters")

        def label_gradient(parameter: Tensor) -> None:
            self.label(parameter.grad, "gradients")

        paths = {module: path or "model" for path, module in model.named_modules()}

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if module in paths:
                if not self._stack:
                    self._label_inputs(inputs)
                self._begin_call(paths[module])

        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
            if module in paths:
                self._end_call(type(module).__name__)

        with ExitStack() as hooks:  # handles remove their hooks as they exit
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(label_gradient))
            # Hooks of single modules would switch fused blocks off.
            hooks.enter_context(register_module_forward_pre_hook(before_forward))
            hooks.enter_context(register_module_forward_hook(after_forward, always_call=True))
            hooks.enter_context(self)
            yield self

    # Called by torch.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (parts := run_parts(self, func, args, kwargs)) is not NotImplemented:
            return parts
        if func.overloadpacket in FUSED_OPTIMIZERS:
            return None  # changes tensors in place; torch would run it on real ones
        if (answer := evaluate_on_host(func, args, kwargs)) is not None:
            self._see(answer, "arange")
            if (line := find_read(func, args)) is not None:
                self.reads[line] = None
            return answer
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._stack:
            if (path := self._path()) != self._call:
                self._end_backward_call()
                self._call, self._call_start = path, len(self.events)
            if func is aten.add.Tensor and self._accumulates(args):
                # Without a dispatch mode, the engine adds a second gradient in place.
                return args[0].add_(args[1])
            if (own := find_makers(func)) and self._is_own(args[0], own) and is_called_by_engine():
                in_place = getattr(aten, f"{func.overloadpacket.__name__}_")
                return in_place(*args, **kwargs)
            if func is aten.view.default and leads_to_modified_view():
                return self._copy_view_gradient(args[0], func(*args))
        if func is aten._embedding_bag_backward.default:
            args = add_bag_numbers(args)
            self._see(args, "offset2bag")
        try:
            out, operation = func(*args, **kwargs), func.overloadpacket
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.obstacle = error
            raise
        if operation is aten.t and out.layout == torch.sparse_coo:  # a copy; a fake one is empty
            parts = args[0]._indices().clone(), args[0]._values().clone()
            out = torch.sparse_coo_tensor(*parts, out.shape, check_invariants=False)
        op = str(operation).removeprefix("aten.")
        if self.cuda:
            out = follow_cudnn(func, args, out)
            if kwargs.get("pin_memory"):
                self._in_host.add(out.untyped_storage())
            if operation in MATRIX_PRODUCTS:
                self._add_cublas(operation, in_backward)
            if operation in CONVOLUTIONS:
                self._see_convolution(operation, args, out, op)
        self._see(out, op)
        self._add_temporaries(operation, args, out, op)
        if self.cuda and func.namespace == "unet3d":  # all of them live until it returns
            temporaries = OPERATORS[func._schema.name].list_temporaries(*args)
            for block in [self._allocate(n, func._schema.name) for n in temporaries]:
                self._free(block)
        return out

    # Blocks.

    def _see(self, tensors: Any, op: str) -> None:
        """Record the storages that are new."""
        for tensor in _list_dense(tensors):
            self._see_storage(tensor.untyped_storage(), op)

    def _see_storage(self, storage: torch.UntypedStorage, op: str) -> None:
        if storage in self._in_host:
            return
        address = storage._cdata
        old, reference = self._live.get(address, (None, lambda: None))
        if old is not None and reference() is not storage:
            self._drop(address)  # freed in C++, and the address reused before the callback
            old = None
        if old is not None and storage.nbytes() <= old.nbytes:
            return

        def on_free(reference: weakref.ref) -> None:
            live = self._live.get(address)
            if live is not None and live[1] is reference:
                self._drop(address)

        block = self._allocate(storage.nbytes(), op)
        if old is not None:  # it has grown
            self._free(old)
        self._live[address] = (block, weakref.ref(storage, on_free))

    def _allocate(self, nbytes: int, op: str, kind: str | None = None) -> Block:
        phase = "recompute" if self.phase == "backward" and self._stack else self.phase
        block = Block(len(self.blocks), nbytes, phase, self._path(), op, len(self.events), kind)
        self.blocks.append(block)
        self.events.append(block.id + 1)
        return block

    def _free(self, block: Block) -> None:
        block.freed_at = len(self.events)
        self.events.append(-(block.id + 1))

    def _drop(self, address: int) -> None:
        block, _ = self._live.pop(address)
        self._free(block)

    def _add_temporaries(self, operation: Any, args: tuple, out: Any, op: str) -> None:
        """Record what a kernel allocates and frees before it returns."""
        if (nbytes := find_kept_bytes(operation, args, out)) is not None:
            self._live[_address(out)][0].nbytes = nbytes
        for nbytes, what in list_temporaries(operation, args, out, cuda=self.cuda):
            self._free(self._allocate(nbytes, f"{op}: {what}"))

    def _see_convolution(self, operation: Any, args: tuple, out: Any, op: str) -> None:
        """Record the outputs of a convolution, each followed by its workspace."""
        is_forward = operation is aten.convolution
        result, x, weight = (out, *args[:2]) if is_forward else args[:3]
        groups = args[-1 if is_forward else -2]
        if columns := get_column_bytes(x, weight, result, groups):
            self._see(out, op)
            return self._free(self._allocate(columns, COLUMNS))
        copy = None
        if is_forward:
            outputs, workspaces = [out], [get_forward_workspace(x, weight, out, groups)]
        else:
            outputs, transposed = out[:2], args[7]
            workspaces = get_backward_workspaces(result, x, weight, groups, transposed)
            if not is_dense(result):
                copy = self._allocate(result.nbytes, f"{op}: contiguous copy")
        for output, nbytes in zip(outputs, workspaces, strict=True):
            if output is not None:
                self._see(output, op)
                workspace = self._allocate(nbytes, "cuDNN", "workspaces")
                self._free(workspace)
                if output.shape == weight.shape and not is_forward:
                    self.weights[workspace.id] = weight.numel()
        if copy is not None:
            self._free(copy)

    def _add_cublas(self, operation: Any, in_backward: bool) -> None:
        """Record the workspaces that cuBLAS allocates once for a thread, and keeps."""
        users = ["backward" if in_backward else "forward"]
        if operation is aten.addmm:
            users.append("cuBLASLt")
        for user in users:
            if (self._stream, user) not in self._cublas_users:
                self._cublas_users.add((self._stream, user))
                nbytes = CUBLASLT_BYTES if user == "cuBLASLt" else get_cublas_bytes()
                self._allocate(nbytes, "cuBLAS", "workspaces")

    def _copy_view_gradient(self, grad: Tensor, view: Tensor) -> Tensor:
        """Return the gradient of a view that was modified in place, as AsStridedBackward does.

        Autograd copies it to new memory, and frees the old one if nothing else references it. Fake
        tensors would go through the view itself and copy nothing.
        """
        copy = torch.empty_like(view, memory_format=torch.contiguous_format)
        self._see(copy, "as_strided_backward")
        if _address(grad) in self._live and is_unshared(grad, tensors=5, storages=3):
            self._drop(_address(grad))  # torch keeps it as the base of the returned tensor
        return copy

    def _accumulates(self, args: tuple) -> bool:
        """Return whether the engine adds to a gradient that nothing else references."""
        first, second = args[:2]
        if not is_called_by_engine() or not isinstance(second, Tensor):
            return False
        if adds_to_new_tensor(self._is_own(first)):
            return False
        if torch.is_grad_enabled():  # create_graph: both may be needed again
            return False
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        block, _ = self._live.get(_address(first), (None, None))
        storage = first.untyped_storage()  # one of the two references to it below
        return (
            block is not None
            and block.phase in ("backward", "recompute")
            and block.kind is None
            and first._base is None
            and storage.nbytes() == first.nbytes
            and is_unshared(first, tensors=4, storages=2)
        )

    def _is_own(self, tensor: Tensor, ops: tuple[str, ...] = ()) -> bool:
        """Return whether the running node has made a tensor, and by one of `ops` if given."""
        block, _ = self._live.get(_address(tensor), (None, None))
        is_new = block is not None and block.allocated_at >= self._node_start
        return is_new and (not ops or block.op in ops)

    # Modules.

    def _path(self) -> str:
        if self._stack:
            return self._stack[-1].path
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        if number != self._node:
            self._node, self._node_start = number, len(self.events)
            if (formula := find_other_formula(node, cuda=self.cuda)) is not None:
                self.formulas[formula] = None
        if number < self._num_forward_nodes:  # else it belongs to the node before it
            self._last_path = self._node_paths.get(number, "")
        return self._last_path

    def _label_inputs(self, inputs: Any) -> None:
        """Label what a network reads, if no module has computed it."""
        for tensor in _list_dense(inputs):
            block, _ = self._live.get(_address(tensor), (None, None))
            if block is not None and not (block.kind or block.path):
                block.kind = "input"

    def _begin_call(self, path: str) -> None:
        if self._stack:
            self._stack[-1].is_leaf = False
        self._stack.append(OpenCall(path, len(self.events), get_sequence_number()))

    def _end_call(self, kind: str) -> None:
        call = self._stack.pop()
        for number in range(call.first_node, get_sequence_number()):
            self._node_paths.setdefault(number, call.path)  # children have set theirs
        if call.is_leaf and self.phase == "forward":
            self._leaves[call.path] = kind
            now = len(self.events)
            self.calls.append(EventRange(call.path, kind, "forward", call.start, now))

    def _end_backward_call(self) -> None:
        if self._call in self._leaves:
            kind, now = self._leaves[self._call], len(self.events)
            self.calls.append(EventRange(self._call, kind, "backward", self._call_start, now))
        self._call = ""


def _list_dense(tensors: Any) -> Iterator[Tensor]:
    """Yield the tensors that have storages: of sparse ones, their indices and values."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor):
            is_sparse = tensor.layout == torch.sparse_coo
            yield from (tensor._indices(), tensor._values()) if is_sparse else (tensor,)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
