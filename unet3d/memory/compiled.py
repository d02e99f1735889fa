"""Say what a compiled step takes, from the estimate of the same step without compilation.

Compiled code keeps fewer activations, because it recomputes those that are cheap. How many is
decided by TorchInductor when it compiles, which takes minutes and needs the GPU.
"""

from unet3d.memory.estimate import MemoryEstimate

LEAST_SHARE = 0.4
"""The smallest part of the plain step's activations that is assumed to be left. Compiled steps of
unet_tiny (instance and batch norm), naive_small and dynunet kept 0.5 to 0.9 on a CPU."""

FIXED = ("parameters", "gradients", "optimizer state", "averaged weights", "input", "workspaces")


def get_fixed_bytes(estimate: MemoryEstimate) -> int:
    """Return the bytes in use at the peak that compilation does not change."""
    return sum(estimate.kinds.get(kind, 0) for kind in FIXED)


def get_compiled_range(estimate: MemoryEstimate) -> tuple[int, int]:
    """Return the least and the most bytes that a compiled step is assumed to allocate."""
    most = estimate.peak.allocated or 0
    fixed = get_fixed_bytes(estimate)
    return fixed + int(LEAST_SHARE * (most - fixed)), most
