"""Rows of the GPU report about the machine, and about correctness and speed of the kernels."""

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
from torch import Tensor

from scripts.bench.pool import Case, measure, measure_copy_bandwidth
from scripts.gpu.rows import Context, Row
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.loss.dice_ce import DiceCE
from unet3d.machine.system import get_cpu_model
from unet3d.model.fused.ops import norm_ops, upsample_ops
from unet3d.pool.argmax_codes import choose_code, encode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import is_channels_last
from unet3d.pool.reference.approx_median import approx_median, approx_median_gradient
from unet3d.pool.reference.avg import average, average_gradient
from unet3d.pool.reference.max import maximum
from unet3d.pool.reference.median import median
from unet3d.pool.select_backward import scatter_gradient
from unet3d.pool.windows import PoolWindows
from unet3d.types import IGNORE_LABEL
from unet3d.workflows.benchmark import compare_gradients

TAU = 0.1
POOLS = ("median", "max", "avg", "approx_median")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKAGES = ("triton", "lightning", "monai", "numpy")
SMI_FIELDS = "driver_version,clocks.sm,clocks.max.sm,clocks.max.memory,power.limit,ecc.mode.current"


# The machine.


def environment(context: Context) -> dict[str, Row]:
    """Read device and versions, and measure the bandwidth of copies; changes no setting."""
    return {
        "machine": partial(describe_machine, context),
        "copies": partial(measure_copies, context),
    }


def describe_machine(context: Context) -> dict[str, Any]:
    row: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": get_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.release(),
    }
    for package in PACKAGES:
        try:
            row[package] = version(package)
        except PackageNotFoundError:
            row[package] = None
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
        "nvidia_smi": query_nvidia_smi(),
    }


def query_nvidia_smi() -> dict[str, str] | None:
    """Return what nvidia-smi reports of driver, clocks and power; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    values = done.stdout.strip().splitlines()[:1]
    names = SMI_FIELDS.split(",")
    return dict(zip(names, values[0].split(", "), strict=False)) if values else None


def measure_copies(context: Context) -> dict[str, Any]:
    """Return bytes per second within the device (read + written) and to and from pinned memory."""
    if not context.cuda:
        return {"within_device": None}
    on_host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(on_host.shape, dtype=on_host.dtype, device=context.device)
    row = {"within_device": measure_copy_bandwidth(context.device)}
    directions = (("to_host", on_device, on_host), ("from_host", on_host, on_device))
    for name, source, target in directions:
        seconds = []
        for _ in range(5):
            context.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            context.synchronize()
            seconds.append(time.perf_counter() - start)
        row[name] = on_host.nbytes / statistics.median(seconds)
    return row


# Correctness of the kernels.


def correct(context: Context) -> dict[str, Row]:
    """Compare all kernels with their references, at the size of experiment=forum_small."""
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
    names, layouts = (DTYPES, ("contiguous", "channels-last"))
    for (label, windows, shape), pool, dtype, layout in product(cases, POOLS, names, layouts):
        if context.tiny and (dtype != "float32" or label != "2" or layout != "contiguous"):
            continue
        size = (1, 4, 16, 32, 32) if context.tiny else shape  # large enough to select a kernel
        last = layout == "channels-last"
        rows[f"{pool} {label}, {dtype} {layout}"] = partial(
            check_pooling, context, pool, windows, size, DTYPES[dtype], last
        )
    for dtype in names:
        if not (context.tiny and dtype != "float32"):
            rows[f"norms, {dtype}"] = partial(check_norms, context, DTYPES[dtype])
            rows[f"upsampling, {dtype}"] = partial(check_upsampling, context, DTYPES[dtype])
            rows[f"loss, {dtype}"] = partial(check_loss, context, DTYPES[dtype])
    return rows


def check_gradients(context: Context, strategy: str) -> dict[str, Any]:
    """Compare a whole step's loss and gradients with those of plain modules."""
    accelerator = "gpu" if context.cuda else "cpu"
    words = ["model=unet_tiny" if context.tiny else "model=unet_small", "data.num_classes=5"]
    words += ["data.patch_size=[32,32,32]", f"trainer.accelerator={accelerator}"]
    settings = parse_training(compose_config(words, "train"))
    row = compare_gradients(settings, strategy, context.device)
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
    kernels = dispatch.select_kernels(x)
    if kernels is None:
        raise RuntimeError("no kernel supports this tensor")
    y, codes = kernels.forward(x, pool, windows, TAU)
    grad_output = torch.randn_like(y)
    saved = {"codes": codes} if pool in ("median", "max") else {}
    if pool == "approx_median":
        saved = {"x": x, "tau": TAU}
    grad = kernels.backward(grad_output, pool, windows, x.shape, is_channels_last(x), **saved)
    differences = 0
    if pool in ("median", "max"):
        expected, indices = {"median": median, "max": maximum}[pool](x, windows)
        expected_codes = encode(indices, choose_code(pool, windows), windows, x.shape)
        differences = int((codes != expected_codes).sum())
        expected_grad = scatter_gradient(grad_output, indices, windows, x.shape)
    elif pool == "avg":
        expected = average(x, windows)
        expected_grad = average_gradient(grad_output, x.shape, windows)
    else:
        expected = approx_median(x, windows, TAU)
        expected_grad = approx_median_gradient(grad_output, x, windows, TAU)
    # approx_median uses exp2, which GPUs approximate, and divides by tau.
    tolerance = 4 * torch.finfo(dtype).eps + (2e-5 if pool == "approx_median" else 0)
    row = compare(tolerance, {"output": (y, expected), "gradient": (grad, expected_grad)})
    return row | ({"different_codes": differences, "good": False} if differences else {})


def check_norms(context: Context, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the norm kernels with float64, on a slice of the channels of a feature map."""
    torch.manual_seed(0)
    size = (2, 6, 6, 5, 7) if context.tiny else (2, 96, 40, 150, 26)
    y, grad = (make_feature_map(context, size, dtype) for _ in range(2))
    b, c = y.shape[:2]
    scale, shift, mean, inverse = (torch.randn(b, c, device=context.device) for _ in range(4))
    voxels = y[0, 0].numel()

    def run(y: Tensor, grad: Tensor, *parameters: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        output, grad_input = torch.empty_like(y), torch.empty_like(y)
        norm_ops.normalize(y, parameters[0], parameters[1], 0.01, output)
        norm_ops.gradient(grad, y, *parameters, 0.01, grad_input)
        moments, sums = norm_ops.make_sums(y), norm_ops.make_sums(y)
        norm_ops.add_moments(y, 0, moments)
        norm_ops.add_gradient_sums(grad, y, *parameters, 0.01, True, sums)
        means, squares = moments
        return [output, grad_input], [means, squares / voxels, sums / voxels]

    maps, sums = run(y, grad, scale, shift, mean, inverse)
    tensors = (y, grad, scale, shift, mean, inverse)
    exact_maps, exact_sums = run(*(t.double() for t in tensors))
    # Near 0, rounding decides on which side of the activation a value is.
    map_pairs = pair_up(("output", "gradient"), maps, exact_maps)
    map_row = compare(8 * torch.finfo(dtype).eps, map_pairs, max_outliers=1e-5)
    sum_row = compare(1e-5, pair_up(("mean", "variance", "sums"), sums, exact_sums))
    return {
        "worst": map_row["worst"] | sum_row["worst"],
        "tolerance": [map_row["tolerance"], sum_row["tolerance"]],
        "good": map_row["good"] and sum_row["good"],
    }


def check_upsampling(context: Context, dtype: torch.dtype) -> dict[str, Any]:
    """Compare trilinear and nearest upsampling, and their gradients, with float64."""
    torch.manual_seed(0)
    size = (2, 6, 3, 4, 5) if context.tiny else (2, 128, 40, 75, 13)
    x = make_feature_map(context, size, dtype)
    axes: list[int] = []
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for n in x.shape[2:]:
        axes += [0, 2 * n, 0, n]

    def run(x: Tensor, grad_output: Tensor, linear: bool) -> tuple[Tensor, Tensor]:
        output, grad = torch.empty_like(grad_output), torch.zeros_like(x)
        upsample_ops.interpolate(x, axes, linear, output)
        upsample_ops.interpolate_gradient(grad_output, axes, linear, grad)
        return output, grad

    for linear in (True, False):
        grad_output = make_feature_map(context, (*size[:2], *(2 * n for n in size[2:])), dtype)
        name = "linear" if linear else "nearest"
        exact = run(x.double(), grad_output.double(), linear)
        pairs |= pair_up((name, f"{name} gradient"), run(x, grad_output, linear), exact)
    return compare(8 * torch.finfo(dtype).eps + 1e-5, pairs)


def check_loss(context: Context, dtype: torch.dtype) -> dict[str, Any]:
    """Compare Dice + cross-entropy of classes and of regions, and gradients, with float64."""
    torch.manual_seed(0)
    size = (1, 5, 8, 16, 16) if context.tiny else (2, 5, 320, 150, 26)
    logits = torch.randn(size, device=context.device).to(dtype)
    labels = torch.randint(0, 5, (size[0], *size[2:]), device=context.device).to(torch.uint8)
    labels[:, 0] = IGNORE_LABEL
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    overlapping = {f"region {n}": [n, 4] for n in range(5)}
    for name, regions in (("classes", None), ("regions", overlapping)):
        loss, results = DiceCE(regions=regions).to(context.device), []
        for x in (logits, logits.double()):
            leaf = x.detach().requires_grad_()
            value = loss(leaf, labels)
            (gradient,) = torch.autograd.grad(value * labels.numel(), leaf)  # of the order of 1
            results.append((value.detach(), gradient))
        pairs |= pair_up((name, f"{name} gradient"), *results)
    return compare(8 * torch.finfo(dtype).eps + 1e-5, pairs)


def make_feature_map(context: Context, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return all but two channels of a channels-last tensor."""
    b, c, *space = size
    x = torch.randn(b, c, *space, device=context.device).to(dtype)
    return x.contiguous(memory_format=torch.channels_last_3d)[:, 2:]


def pair_up(
    names: Sequence[str], results: Sequence[Tensor], expected: Sequence[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return {name: (result, expected)}."""
    return dict(zip(names, zip(results, expected, strict=True), strict=True))


def compare(
    tolerance: float, pairs: dict[str, tuple[Tensor, Tensor]], max_outliers: float = 0.0
) -> dict[str, Any]:
    """Return the largest difference of each pair: relative above 1, absolute below.

    Up to a fraction of `max_outliers` elements may differ by more than the tolerance.
    """
    worst, outliers = {}, {}
    for name, (result, expected) in pairs.items():
        result, expected = result.double(), expected.double()
        equal = (result == expected) | (result.isnan() & expected.isnan())
        difference = (result - expected).abs() / expected.abs().clamp(min=1)
        difference = torch.where(equal, 0, difference)
        difference = difference.nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst[name] = float(difference.max())
        outliers[name] = float((difference > tolerance).double().mean())
    good = all(fraction <= max_outliers for fraction in outliers.values())
    return {"worst": worst, "tolerance": tolerance, "good": good}


# Speed of the poolings.


def pool(context: Context) -> dict[str, Row]:
    """Time all poolings, as ratios to nn.MaxPool3d and to a copy in the same round."""
    cases = [
        Case((2, 64, 320, 150, 26), "float32", False),
        Case((2, 64, 320, 150, 26), "bfloat16", False),
        Case((2, 64, 320, 150, 26), "float32", True),
        Case((2, 64, 320, 150, 26), "bfloat16", True),
        Case((2, 64, 321, 151, 27), "bfloat16", False),
        Case((2, 256, 40, 18, 3), "bfloat16", True),
    ]
    if context.tiny:
        cases = [Case((1, 2, 8, 8, 8), "float32", False)]
    return {case.title: partial(time_poolings, context, case) for case in cases}


def time_poolings(context: Context, case: Case) -> dict[str, Any]:
    x = case.make_input(context.device)
    bandwidth = measure_copy_bandwidth(context.device)
    rounds, seconds = (1, 1.0) if context.tiny else (40, 8.0)
    rows = measure(x, rounds, seconds, bandwidth)
    return {
        "copy_bandwidth": bandwidth,
        "rows": {row.pool: row._asdict() for row in rows},
    }
