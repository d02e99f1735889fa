"""Rows of the GPU's report: the machine, and its kernels' correctness and speed."""

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

import bench_pool
import torch
from gpu_rows import Row, Where
from torch import Tensor

from unet3d.model.lean.ops import norm_ops, upsample_ops
from unet3d.pool.argmax_codes import choose_code, encode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import is_channels_last
from unet3d.pool.reference.approx_median import approx_median, approx_median_gradient
from unet3d.pool.reference.avg import average, average_gradient
from unet3d.pool.reference.max import maximum
from unet3d.pool.reference.median import median
from unet3d.pool.select_backward import scatter_gradient
from unet3d.pool.windows import Windows

TAU = 0.1
POOLS = ("median", "max", "avg", "approx_median")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKAGES = ("triton", "lightning", "monai", "numpy")
ASKED = "driver_version,clocks.sm,clocks.max.sm,clocks.max.memory,power.limit,ecc.mode.current"


# What it is measured on.


def environment(where: Where) -> dict[str, Row]:
    """Device, versions, and how fast memory is copied; nothing is set, only read."""
    return {"machine": partial(machine, where), "copies": partial(copies, where)}


def machine(where: Where) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": bench_pool.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.release(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if not where.cuda:
        return found | {"device": "cpu"}
    properties = torch.cuda.get_device_properties(where.device)
    return found | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "read": asked(),
    }


def asked() -> dict[str, str] | None:
    """What nvidia-smi says of driver, clocks and power."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    values = done.stdout.strip().splitlines()[:1]
    return dict(zip(ASKED.split(","), values[0].split(", "), strict=False)) if values else None


def copies(where: Where) -> dict[str, Any]:
    """Bytes a second: within the device (read and written), and from and to pinned memory."""
    if not where.cuda:
        return {"within_device": None}
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(host.shape, dtype=host.dtype, device=where.device)
    found = {"within_device": bench_pool.copy_bandwidth(where.device)}
    for name, source, target in (("to_host", here, host), ("from_host", host, here)):
        seconds = []
        for _ in range(5):
            where.wait()
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            where.wait()
            seconds.append(time.perf_counter() - begun)
        found[name] = host.nbytes / statistics.median(seconds)
    return found


# Whether the kernels are right.


def correct(where: Where) -> dict[str, Row]:
    """Every kernel against its definition, at the size of the forum's job."""
    rows: dict[str, Row] = {}
    cases = [
        ("2", Windows.from_args(2, None, 0), (2, 64, 320, 150, 26)),
        ("2, odd", Windows.from_args(2, None, 0), (2, 64, 321, 151, 27)),
        ("1x2x2", Windows.from_args((1, 2, 2), None, 0), (2, 64, 80, 75, 26)),
        ("3, padded", Windows.from_args(3, 2, 1), (2, 32, 160, 75, 26)),
    ]
    names, layouts = (DTYPES, ("contiguous", "channels-last"))
    for (label, windows, shape), pool, dtype, layout in product(cases, POOLS, names, layouts):
        if where.tiny and (dtype != "float32" or label != "2" or layout != "contiguous"):
            continue
        size = (1, 4, 16, 32, 32) if where.tiny else shape  # what kernels are worth
        last = layout == "channels-last"
        rows[f"{pool} {label}, {dtype} {layout}"] = partial(
            pooled, where, pool, windows, size, DTYPES[dtype], last
        )
    for dtype in names:
        if not (where.tiny and dtype != "float32"):
            rows[f"norms, {dtype}"] = partial(norms, where, DTYPES[dtype])
            rows[f"upsampling, {dtype}"] = partial(upsampling, where, DTYPES[dtype])
    return rows


def pooled(
    where: Where, pool: str, windows: Windows, size: tuple, dtype: torch.dtype, last: bool
) -> dict[str, Any]:
    """A pooling's output, recorded places and gradient."""
    torch.manual_seed(0)
    x = torch.randn(size, device=where.device).clamp(min=-0.3)  # ties, as a ReLU leaves them
    if pool in ("median", "max"):
        for value, seed in ((torch.nan, 1), (torch.inf, 2), (-torch.inf, 3)):
            places = torch.Generator(where.device).manual_seed(seed)
            x[torch.rand(x.shape, device=where.device, generator=places) < 1e-4] = value
    x = x.to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    fast = dispatch.select_kernels(x)
    if fast is None:
        raise RuntimeError("no kernel takes this tensor here")
    y, recorded = fast.forward(x, pool, windows, TAU)
    upper = torch.randn_like(y)
    given = {"recorded": recorded} if pool in ("median", "max") else {}
    if pool == "approx_median":
        given = {"x": x, "tau": TAU}
    g = fast.backward(upper, pool, windows, x.shape, is_channels_last(x), **given)
    differ = 0
    if pool in ("median", "max"):
        expected, places = {"median": median, "max": maximum}[pool](x, windows)
        right = encode(places, choose_code(pool, windows), windows, x.shape)
        differ = int((recorded != right).sum())
        g_expected = scatter_gradient(upper, places, windows, x.shape)
    elif pool == "avg":
        expected, g_expected = average(x, windows), average_gradient(upper, x.shape, windows)
    else:
        expected = approx_median(x, windows, TAU)
        g_expected = approx_median_gradient(upper, x, windows, TAU)
    # The smooth one has exp2, which a GPU approximates, and divides by tau.
    tolerance = 4 * torch.finfo(dtype).eps + (2e-5 if pool == "approx_median" else 0)
    found = judged(tolerance, {"output": (y, expected), "gradient": (g, g_expected)})
    return found | ({"places_that_differ": differ, "good": False} if differ else {})


def norms(where: Where, dtype: torch.dtype) -> dict[str, Any]:
    """The lean blocks' kernels against the same in float64, on some rows and channels of a map."""
    torch.manual_seed(0)
    size = (2, 6, 6, 5, 7) if where.tiny else (2, 96, 40, 150, 26)
    y, g = (mapped(where, size, dtype) for _ in range(2))
    b, c = y.shape[:2]
    scale, shift, mean, inverse = (torch.randn(b, c, device=where.device) for _ in range(4))
    voxels = y[0, 0].numel()

    def made(y: Tensor, g: Tensor, *numbers: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        out, to = torch.empty_like(y), torch.empty_like(y)
        norm_ops.normalize(y, numbers[0], numbers[1], 0.01, out)
        norm_ops.gradient(g, y, *numbers, 0.01, to)
        means, squares = norm_ops.moments(y)
        sums = norm_ops.gradient_sums(g, y, *numbers, 0.01)
        return [out, to], [means, squares / voxels, sums / voxels]

    maps, sums = made(y, g, scale, shift, mean, inverse)
    exact, exact_sums = made(*(t.double() for t in (y, g, scale, shift, mean, inverse)))
    names = ("output", "gradient"), ("mean", "variance", "sums")
    # Where a value is next to 0, rounding decides on which side of the activation it lies.
    one = judged(8 * torch.finfo(dtype).eps, paired(names[0], maps, exact), stray=1e-5)
    other = judged(1e-5, paired(names[1], sums, exact_sums))
    return {
        "worst": one["worst"] | other["worst"],
        "tolerance": [one["tolerance"], other["tolerance"]],
        "good": one["good"] and other["good"],
    }


def upsampling(where: Where, dtype: torch.dtype) -> dict[str, Any]:
    """Trilinear and nearest, and their transposes, against float64."""
    torch.manual_seed(0)
    size = (2, 6, 3, 4, 5) if where.tiny else (2, 128, 40, 75, 13)
    low = mapped(where, size, dtype)
    axes: list[int] = []
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for n in low.shape[2:]:
        axes += [0, 2 * n, 0, n]

    def made(low: Tensor, upper: Tensor, linear: bool) -> tuple[Tensor, Tensor]:
        out, back = torch.empty_like(upper), torch.zeros_like(low)
        upsample_ops.interpolate(low, axes, linear, out)
        upsample_ops.interpolate_gradient(upper, axes, linear, back)
        return out, back

    for linear in (True, False):
        upper = mapped(where, (*size[:2], *(2 * n for n in size[2:])), dtype)
        name = "linear" if linear else "nearest"
        exact = made(low.double(), upper.double(), linear)
        found |= paired((name, f"{name} gradient"), made(low, upper, linear), exact)
    return judged(8 * torch.finfo(dtype).eps + 1e-5, found)


def mapped(where: Where, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Some channels of a larger channels-last map."""
    b, c, *space = size
    x = torch.randn(b, c, *space, device=where.device).to(dtype)
    return x.contiguous(memory_format=torch.channels_last_3d)[:, 2:]


def paired(
    names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """What was found beside what was expected, by name."""
    return dict(zip(names, zip(found, expected, strict=True), strict=True))


def judged(
    tolerance: float, pairs: dict[str, tuple[Tensor, Tensor]], stray: float = 0.0
) -> dict[str, Any]:
    """The worst difference of each pair: from 1 up relative, below absolute.

    So large a share of them may be `stray`, beyond the tolerance.
    """
    worst, beyond = {}, {}
    for name, (found, expected) in pairs.items():
        found, expected = found.double(), expected.double()
        same = (found == expected) | (found.isnan() & expected.isnan())
        apart = (found - expected).abs() / expected.abs().clamp(min=1)
        apart = torch.where(same, 0, apart).nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst[name] = float(apart.max())
        beyond[name] = float((apart > tolerance).double().mean())
    good = all(share <= stray for share in beyond.values())
    return {"worst": worst, "tolerance": tolerance, "good": good}


# How fast the poolings are.


def pool(where: Where) -> dict[str, Row]:
    """Every pooling against nn.MaxPool3d in the same round, and against a copy."""
    cases: list[tuple[tuple[int, ...], str, bool]] = [
        ((2, 64, 320, 150, 26), "float32", False),
        ((2, 64, 320, 150, 26), "bfloat16", False),
        ((2, 64, 320, 150, 26), "float32", True),
        ((2, 64, 320, 150, 26), "bfloat16", True),
        ((2, 64, 321, 151, 27), "bfloat16", False),
        ((2, 256, 40, 18, 3), "bfloat16", True),
    ]
    if where.tiny:
        cases = [((1, 2, 8, 8, 8), "float32", False)]
    rows: dict[str, Row] = {}
    for shape, dtype, last in cases:
        title = f"{'x'.join(map(str, shape))} {dtype}{' channels-last' if last else ''}"
        rows[title] = partial(raced, where, shape, DTYPES[dtype], last)
    return rows


def raced(where: Where, shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> dict[str, Any]:
    layout = torch.channels_last_3d if last else torch.contiguous_format
    x = torch.randn(shape, device=where.device, dtype=dtype)
    x = x.contiguous(memory_format=layout).requires_grad_()
    bandwidth = bench_pool.copy_bandwidth(where.device)
    rounds, seconds = (1, 1.0) if where.tiny else (40, 8.0)
    rows = bench_pool.measure(x, rounds, seconds, bandwidth)
    return {
        "copy_bandwidth": bandwidth,
        "rows": {row.pool: row._asdict() for row in rows},
    }
