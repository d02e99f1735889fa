"""Run the augmentation of nnU-Net's trainer where it trains, while the step before it runs.

The transforms are nnU-Net's own, as its trainer builds them, so they draw and compute what they do
in its loader. batchgeneratorsv2 0.3.6 writes them for the CPU: what they create there is created on
the device, and what they mix is moved.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from unet3d.nnunet.context_loader import find_spatial, use_seed

CPU = torch.device("cpu")


class MoveToDevice(TorchFunctionMode):
    """Operations on tensors of several devices run on the one that is not the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        devices = {tensor.device for tensor in leaves if tensor.dim()} - {CPU}
        if func is Tensor.numpy and devices:
            return args[0].cpu().numpy()
        if len(devices) == 1 and any(t.device == CPU for t in leaves):
            [device], first = devices, args[0]
            changes_first = func.__name__.endswith("_") or func is Tensor.__setitem__
            if changes_first and isinstance(first, Tensor) and first.dim() and first.device == CPU:
                raise RuntimeError(f"{func.__name__} would change a tensor on the CPU")

            def move(tensor: Tensor) -> Tensor:
                return tensor.to(device, non_blocking=True) if tensor.dim() else tensor

            args, kwargs = tree_map_only(Tensor, move, (args, kwargs))
        return func(*args, **kwargs)


def list_parts(transform: Any) -> list[Any]:
    """Return the transforms that a transform calls."""
    parts = getattr(transform, "transforms", None) or getattr(transform, "list_of_transforms", [])
    return [*parts, *filter(None, [getattr(transform, "transform", None)])]


def run_on(device: torch.device, transform: Any) -> None:
    """Let a transform of batchgeneratorsv2 create its tensors on a device.

    Random numbers are still drawn on the CPU: a program would wait for those of a GPU.
    """
    parts = list_parts(transform)
    for part in parts:
        run_on(device, part)
    if parts:
        return
    apply = transform.apply

    def apply_on_device(data: dict[str, Any], **parameters: Any) -> dict[str, Any]:
        with device:
            return apply(data, **parameters)

    transform.apply = apply_on_device
    if hasattr(transform, "_get_base_grid_clone"):
        with device:
            transform._get_base_grid_clone()  # which keeps the grid


def make_certain(transform: Any) -> None:
    """Let a transform change every sample, in every way."""
    for part in list_parts(transform):
        make_certain(part)
    for name in vars(transform):
        if name.startswith("p_") or name == "apply_probability":
            setattr(transform, name, 1.0)


class DeviceAugmenter:
    """Batches of a loader of contexts, augmented on a device.

    All changes are tried on the first batch, so that those that the device cannot do raise early.
    """

    seed: int | None = None  # of the rotation and scale for which a context was read

    def __init__(self, loader: Iterator[Mapping[str, Any]], transforms: Any, device: torch.device):
        self.loader, self.transforms, self.device = loader, deepcopy(transforms), device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.prepared: dict[str, Any] | None = None
        make_certain(self.transforms)
        run_on(device, self.transforms)
        self._augment({**next(loader), "seeds": []})
        self.transforms, spatial = transforms, find_spatial(transforms)
        run_on(device, self.transforms)
        if spatial is not None:
            vars(spatial)["get_parameters"] = partial(self._draw_again, spatial.get_parameters)

    def __iter__(self) -> "DeviceAugmenter":
        return self

    def __next__(self) -> dict[str, Any]:
        self.prepare()
        batch, self.prepared = self.prepared, None
        assert batch is not None
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for tensor in tree_leaves((batch["data"], batch["target"])):
                tensor.record_stream(current)
        return batch

    def prepare(self) -> None:
        """Begin with the next batch, unless that was done."""
        if self.prepared is None:
            self.prepared = self._augment(next(self.loader))

    def _draw_again(self, draw: Callable[..., Any], **sample: Any) -> Any:
        with nullcontext() if self.seed is None else use_seed(self.seed):
            return draw(**sample)

    @torch.no_grad()
    def _augment(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with on_stream, MoveToDevice():
            samples = []
            for image, label, self.seed in zip_longest(
                raw["data"], raw["target"], raw.get("seeds", ())
            ):
                image, label = (t.to(self.device, non_blocking=True) for t in (image, label))
                samples.append(self.transforms(image=image, segmentation=label))
            targets = [sample["segmentation"] for sample in samples]
            return {
                "data": torch.stack([sample["image"] for sample in samples]),
                "target": [torch.stack(level) for level in zip(*targets, strict=True)]
                if isinstance(targets[0], list)
                else torch.stack(targets),
                "keys": raw["keys"],
            }
