"""How many variants of our Triton kernels a first step compiles: about half a second each."""

from collections import Counter
from typing import Any

import pytest
import torch

from scripts.bench.step import build_cuda_step, list_forum_networks
from unet3d.memory.estimate import list_launches


def specialize(kernel: Any, name: str, value: Any) -> Any:
    """Return what Triton compiles a kernel for: dtypes, alignment, and the values of some ints."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, float) or name in (kernel.do_not_specialize or ()):
        return type(value).__name__
    return value if value == 1 else value % 16 == 0


@pytest.mark.parametrize(("strategy", "most"), [("fused", 20), ("lean", 24)])
def test_a_first_step_compiles_few_variants_of_each_kernel(strategy, most):
    network = list_forum_networks("small")[strategy]
    launches = list_launches(lambda: build_cuda_step(network, [320, 150, 26], 2, "16"))
    variants: Counter[str] = Counter()
    seen = set()
    for launch in launches:
        parameters = launch.kernel.params
        values = dict(zip((p.name for p in parameters), launch.arguments, strict=False))
        values |= launch.constants
        key = [launch.kernel.fn.__name__]
        for parameter in parameters:
            value = values[parameter.name]
            constant = parameter.is_constexpr
            key.append(value if constant else specialize(launch.kernel, parameter.name, value))
        if tuple(key) not in seen:
            seen.add(tuple(key))
            variants[key[0]] += 1
    assert {"normalize_kernel", "sum_terms_kernel", "tiled_kernel"} <= set(variants)
    assert sum(variants.values()) <= most, variants
