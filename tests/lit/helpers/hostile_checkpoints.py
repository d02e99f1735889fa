"""Change one part of a checkpoint, in ways that nobody who saves one does."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

Path = tuple[Any, ...]


def transpose(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in reverse."""
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


LAYOUTS = {
    "expanded": lambda t: torch.zeros(()).expand(t.shape),
    "transposed": lambda t: transpose(transpose(t).contiguous()),
    "with gaps": lambda t: torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0],
}
"""Other memory layouts; a single number has only one."""

TENSORS = {
    **LAYOUTS,
    "of one value": lambda t: torch.zeros(1),
    "larger": lambda t: torch.zeros(*t.shape, 2),
    "of no value": lambda t: torch.zeros(0),
    "overlapping": lambda t: torch.zeros(t.numel() + 1).as_strided((t.numel(), 2), (1, 1)),
    "of ints": lambda t: torch.zeros(t.shape, dtype=torch.int32),
    "complex": lambda t: torch.zeros(t.shape, dtype=torch.complex64),
    "float8": lambda t: torch.zeros(t.shape).to(torch.float8_e4m3fn),
    "sparse": lambda t: torch.zeros(t.shape).to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(torch.zeros(t.shape), 0.1, 0, torch.qint8),
    "on no device": lambda t: torch.zeros(t.shape, device="meta"),
    "a number": lambda t: 1.5,
    "a name": lambda t: "x",
    "nothing": lambda t: None,
}
"""What may stand where a tensor is expected."""

VALUES = (
    *(None, "x", "", -1, 2**70, 2**2000, 0.5, 10.0, float("nan"), float("inf")),
    *([], {}, [[1]], {"a": 1}),
)
"""What may stand where another value is expected."""


def iter_paths(content: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the way to every value, those that hold others included."""
    pairs: Any = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content)
    for key, value in pairs:
        yield (*path, key)
        yield from iter_paths(value, (*path, key))


def get(content: Any, path: Path) -> Any:
    """Return a value."""
    for key in path:
        content = content[key]
    return content


def change(content: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return the content with another value."""
    changed = deepcopy(content)
    get(changed, path[:-1])[path[-1]] = value
    return changed


def remove(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content without a value."""
    changed = deepcopy(content)
    del get(changed, path[:-1])[path[-1]]
    return changed
