"""Measure the memory of each layer of a real step with hooks, in the rows of an estimate."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from unet3d.memory.estimate import Layer

Reading = tuple[int, int]
"""Bytes allocated and reserved."""


class LayerRecorder:
    """Reads the device's memory before and after each leaf module, in forward and backward."""

    def __init__(self, read: Callable[[], Reading]):
        self.read = read
        self.layers: list[Layer] = []

    @contextmanager
    def record(self, model: nn.Module) -> Generator["LayerRecorder"]:
        """Record the model's leaf modules while the body runs."""
        self._paths = {module: path for path, module in model.named_modules()}
        handles = [  # for all modules: a hook of one of them would switch fused blocks off
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        self._before: list[tuple[int, int]] = []
        self._num_calls = 0
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module in self._paths:
            self._num_calls += 1
            self._before.append((self.read()[0], self._num_calls))

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in self._paths:
            return
        before, call = self._before.pop()
        if call != self._num_calls:
            return
        path, kind = self._paths[module], type(module).__name__
        self._add(path, kind, "forward", before)
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        for node in dict.fromkeys(t.grad_fn for t in tensors if t.grad_fn is not None):
            self._watch(node, path, kind)

    def _watch(self, node: Any, path: str, kind: str) -> None:
        """Hook the autograd node: backward hooks on modules forbid in-place operations."""
        before: list[int] = []
        node.register_prehook(lambda grads: before.append(self.read()[0]))
        node.register_hook(lambda outputs, grads: self._add(path, kind, "backward", before.pop()))

    def _add(self, path: str, kind: str, phase: str, before: int) -> None:
        allocated, reserved = self.read()
        self.layers.append(Layer(path, kind, phase, allocated, allocated - before, reserved))
