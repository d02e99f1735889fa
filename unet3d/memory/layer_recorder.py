"""The layers of a real step, measured: the same rows as a prediction's, by hooks."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.memory.estimate import Layer

Reading = tuple[int, int]
"""Bytes allocated and reserved now."""


class LayerRecorder:
    """Reads the device around each module that calls no other, on the way down and back."""

    def __init__(self, read: Callable[[], Reading]):
        self.read = read
        self.layers: list[Layer] = []

    @contextmanager
    def record(self, model: nn.Module) -> Generator["LayerRecorder"]:
        """Record while the body runs."""
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._begins))
            handles.append(module.register_forward_hook(self._ends(path, type(module).__name__)))
        self._before: list[tuple[int, int]] = []
        self._called = 0
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self._called += 1
        self._before.append((self.read()[0], self._called))

    def _ends(self, path: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            before, called = self._before.pop()
            if called != self._called:
                return
            self._add(path, kind, "forward", before)
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            for node in dict.fromkeys(t.grad_fn for t in tensors if t.grad_fn is not None):
                self._watch(node, path, kind)

        return hook

    def _watch(self, node: Any, path: str, kind: str) -> None:
        """Hooks on the node, not on the module: those of modules forbid operations in place."""
        before: list[int] = []
        node.register_prehook(lambda grads: before.append(self.read()[0]))
        node.register_hook(lambda made, grads: self._add(path, kind, "backward", before.pop()))

    def _add(self, path: str, kind: str, phase: str, before: int) -> None:
        allocated, reserved = self.read()
        self.layers.append(Layer(path, kind, phase, allocated, allocated - before, reserved))
