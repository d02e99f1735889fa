"""Compare checkpoints bit for bit: weights, the state of the optimizer, and the step.

python -m scripts.compare_checkpoints A.ckpt B.ckpt    # prints identical or different
"""

import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten

PARTS = ("state_dict", "optimizer_states", "global_step")


def is_identical(*paths: Path) -> bool:
    """Return whether two checkpoints are equal, tensors bit for bit."""
    contents = (torch.load(path, weights_only=True, map_location="cpu") for path in paths)
    (one, structure), (other, same) = (tree_flatten([c[p] for p in PARTS]) for c in contents)
    return structure == same and all(
        a.dtype == b.dtype and a.equal(b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


if __name__ == "__main__":
    print("identical" if is_identical(*map(Path, sys.argv[1:])) else "different")
