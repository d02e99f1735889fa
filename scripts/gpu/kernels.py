"""Rows of the GPU report about the machine, and about correctness and speed of the kernels."""

import platform
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.bench.pool import Case, measure
from scripts.gpu.rows import Context, Row
from scripts.gpu.steps import compose_step
from unet3d.control_groups import count_usable_cores
from unet3d.machine import get_cpu_model
from unet3d.memory.benchmark import compare_gradients
from unet3d.pool.argmax_codes import allocate_outputs
from unet3d.pool.kernels import plain, select_kernels
from unet3d.pool.operators import choose_saved
from unet3d.pool.windows import PoolWindows
from unet3d.report.run_report import collect_versions

TAU = 0.1
POOLS = ("median", "max", "avg", "approx_median")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# The machine.


def environment(context: Context) -> dict[str, Row]:
    """Read device and versions; changes no setting."""
    return {"machine": partial(describe_machine, context)}


def describe_machine(context: Context) -> dict[str, Any]:
    row: dict[str, Any] = {
        **collect_versions(),
        "triton": version("triton") if find_spec("triton") else None,
        "processor": get_cpu_model(),
        "cores": count_usable_cores(),
        "system": platform.release(),
    }
    if not context.cuda:
        return row | {"device": "cpu"}
    properties = torch.cuda.get_device_properties(context.device)
    return row | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


# Correctness of the kernels.


def correct(context: Context) -> dict[str, Row]:
    """Compare steps of fused blocks with plain modules, and pooling kernels with references."""
    rows: dict[str, Row] = {
        f"gradients, {strategy}": partial(check_gradients, context, strategy)
        for strategy in ("fused", "lean")
    }
    cases = [
        ("2", PoolWindows.from_args(2, None, 0), (2, 64, 320, 150, 26)),
        ("2, odd", PoolWindows.from_args(2, None, 0), (2, 64, 321, 151, 27)),
        ("1x2x2", PoolWindows.from_args((1, 2, 2), None, 0), (2, 64, 80, 75, 26)),
        ("3, padded", PoolWindows.from_args(3, 2, 1), (2, 32, 160, 75, 26)),
    ]
    layouts = ("contiguous", "channels-last")
    for (label, windows, shape), pool, dtype, layout in product(cases, POOLS, DTYPES, layouts):
        last = layout == "channels-last"
        rows[f"{pool} {label}, {dtype} {layout}"] = partial(
            check_pooling, context, pool, windows, shape, DTYPES[dtype], last
        )
    return rows


def check_gradients(context: Context, strategy: str) -> dict[str, Any]:
    """Compare a whole step's loss and gradients with those of plain modules."""
    words = ["model=unet_small" if context.cuda else "model=unet_tiny", "data.num_classes=5"]
    words += ["data.patch_size=[32,32,32]", f"trainer.accelerator={context.accelerator}"]
    row = compare_gradients(compose_step(words), strategy, context.device)
    return row | {"good": row["ok"]}


def check_pooling(
    context: Context, pool: str, windows: PoolWindows, size: tuple, dtype: torch.dtype, last: bool
) -> dict[str, Any]:
    """Compare a pooling's output, its argmax codes and its gradient with the reference."""
    torch.manual_seed(0)
    x = torch.randn(size, device=context.device).clamp(min=-0.3)  # ties, as after a ReLU
    if pool in ("median", "max"):
        for value, seed in ((torch.nan, 1), (torch.inf, 2), (-torch.inf, 3)):
            generator = torch.Generator(context.device).manual_seed(seed)
            x[torch.rand(x.shape, device=context.device, generator=generator) < 1e-4] = value
    x = x.to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    kernels = select_kernels(x)
    if kernels is plain:
        raise RuntimeError("no kernel supports this tensor")
    upper = torch.randn_like(allocate_outputs(x, pool, windows)[0])
    y, codes, grad = run_kernels(kernels, x, upper, pool, windows, TAU)
    expected, expected_codes, expected_grad = run_kernels(plain, x, upper, pool, windows, TAU)
    differences = int((codes != expected_codes).sum())
    # approx_median uses exp2, which GPUs approximate, and divides by tau.
    tolerance = 4 * torch.finfo(dtype).eps + (2e-5 if pool == "approx_median" else 0)
    row = compare(tolerance, {"output": (y, expected), "gradient": (grad, expected_grad)})
    return row | ({"different_codes": differences, "good": False} if differences else {})


def run_kernels(
    kernels: ModuleType, x: Tensor, upper: Tensor, pool: str, windows: PoolWindows, tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a pooling's output, its codes, and the gradient of its input, given the output's."""
    y, codes = allocate_outputs(x, pool, windows)
    kernels.forward(x, y, codes, pool, windows, tau)
    grad = torch.empty_like(x)
    kernels.backward(upper, choose_saved(pool, x, codes), grad, pool, windows, tau)
    return y, codes, grad


def compare(tolerance: float, pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return the largest difference of each pair: relative above 1, absolute below."""
    worst = {}
    for name, (result, expected) in pairs.items():
        result, expected = result.double(), expected.double()
        equal = (result == expected) | (result.isnan() & expected.isnan())
        difference = (result - expected).abs() / expected.abs().clamp(min=1)
        difference = torch.where(equal, 0, difference)
        worst[name] = float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    good = all(difference <= tolerance for difference in worst.values())
    return {"worst": worst, "tolerance": tolerance, "good": good}


# Speed of the poolings.


def pool(context: Context) -> dict[str, Row]:
    """Time all poolings, as ratios to nn.MaxPool3d and to a copy in the same round."""
    flat = (2, 64, 320, 150, 26)
    cases = [Case(flat, dtype, last) for last in (False, True) for dtype in ("float32", "bfloat16")]
    cases += [Case((2, 64, 321, 151, 27), "bfloat16"), Case((2, 256, 40, 18, 3), "bfloat16", True)]
    if not context.cuda:
        cases = [Case((1, 2, 8, 8, 8))]
    return {case.title: partial(time_poolings, context, case) for case in cases}


def time_poolings(context: Context, case: Case) -> dict[str, Any]:
    rounds, seconds = (40, 8.0) if context.cuda else (1, 1.0)
    return {"rows": measure(case.make_input(context.device), rounds, seconds)}
