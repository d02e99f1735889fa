"""The layers of a real step, measured: the same rows as a prediction's, by hooks."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.meter.predict import Layer

Reading = tuple[int, int]
"""Bytes allocated and reserved now."""


class LayerRecorder:
    """Reads the device as each leaf module begins and ends, on the way down and on the way back."""

    def __init__(self, read: Callable[[], Reading]):
        self.read = read
        self.layers: list[Layer] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Generator["LayerRecorder"]:
        """Record while the body runs."""
        handles = []
        for path, module in model.named_modules():
            if next(module.children(), None) is None:
                handles.append(module.register_forward_pre_hook(self._begins))
                handles.append(
                    module.register_forward_hook(self._ends(path, type(module).__name__))
                )
        self._before: list[int] = []
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self._before.append(self.read()[0])

    def _ends(self, path: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._add(path, kind, "forward", self._before.pop())
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    self._watch(tensor.grad_fn, path, kind)

        return hook

    def _watch(self, node: Any, path: str, kind: str) -> None:
        """Hooks on the node, not on the module: those of modules forbid operations in place."""
        before: list[int] = []
        node.register_prehook(lambda grads: before.append(self.read()[0]))
        node.register_hook(lambda made, grads: self._add(path, kind, "backward", before.pop()))

    def _add(self, path: str, kind: str, phase: str, before: int) -> None:
        allocated, reserved = self.read()
        self.layers.append(Layer(path, kind, phase, allocated, allocated - before, reserved))
