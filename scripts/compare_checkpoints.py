"""Compare checkpoints bit for bit: weights, the state of the optimizer, and the step.

python -m scripts.compare_checkpoints A.ckpt B.ckpt    # prints identical or different
"""

import sys
from pathlib import Path
from typing import Any

import torch

PARTS = ("state_dict", "optimizer_states", "global_step")


def is_identical(*paths: Path) -> bool:
    """Whether two checkpoints are equal."""
    one, other = (torch.load(path, weights_only=True, map_location="cpu") for path in paths)
    return all(is_equal(one[part], other[part]) for part in PARTS)


def is_equal(one: Any, other: Any) -> bool:
    """Return whether nested values are equal, tensors bit for bit.

    >>> is_equal({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]})
    True
    >>> is_equal([torch.ones(2)], [torch.ones(2, dtype=torch.float64)])
    False
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


if __name__ == "__main__":
    print("identical" if is_identical(*map(Path, sys.argv[1:])) else "different")
