"""Time depthwise convolutions, and a step of MedNeXt S, with and without use_fast_depthwise.

    OMP_NUM_THREADS=1 python -m scripts.bench.depthwise

Rounds are interleaved; seconds are processor seconds of one thread, medians over rounds. A ratio is
torch's seconds by ours. Layers take channels-last maps, as those of a network do.
"""

from collections.abc import Callable
from copy import deepcopy
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from monai.networks.nets.mednext import create_mednext
from torch import nn

from scripts.bench.results import make_parser, write_results
from unet3d.machine import get_cpu_model
from unet3d.model.depthwise import LAYOUT, use_fast_depthwise

LAYERS = (  # channels, kernel size, stride, voxels per axis
    *((nn.Conv3d, 32, 3, 1, 48), (nn.Conv3d, 32, 5, 1, 32), (nn.Conv3d, 128, 3, 1, 16)),
    *((nn.Conv3d, 512, 3, 1, 4), (nn.Conv3d, 32, 3, 2, 48), (nn.ConvTranspose3d, 64, 3, 2, 16)),
)
DTYPES = (torch.float32, torch.bfloat16)


def compare(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the seconds of torch's step and ours, and their ratio."""
    for step in steps.values():
        step()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = process_time()
            step()
            seconds[name].append(process_time() - start)
    row = {name: median(times) for name, times in seconds.items()}
    row["ratio"] = row["torch"] / row["ours"]
    return row


def compare_modules(
    plain: nn.Module, run: Callable[[nn.Module], None], rounds: int
) -> dict[str, float]:
    """Compare steps of a module and of a copy of it."""
    fast = deepcopy(plain)
    use_fast_depthwise(fast)
    return compare({"torch": lambda: run(plain), "ours": lambda: run(fast)}, rounds)


def compare_layer(kind: Any, channels: int, kernel: int, stride: int, size: int, dtype: Any) -> Any:
    """Compare forward and backward of one convolution."""
    plain = kind(channels, channels, kernel, stride, kernel // 2, groups=channels).to(dtype)
    x = torch.randn(1, channels, size, size, size, dtype=dtype).contiguous(memory_format=LAYOUT)
    upper = torch.randn_like(plain(x))

    def run(module: nn.Module) -> None:
        module.zero_grad()
        module(x.requires_grad_()).backward(upper)
        x.grad = None

    return compare_modules(plain, run, 7)


def compare_network(kernel: int, size: int, dtype: Any) -> Any:
    """Compare forward and backward of MedNeXt S with two volumes."""
    x = torch.randn(2, 1, size, size, size)
    labels = torch.randint(0, 4, (2, size, size, size))

    def run(module: nn.Module) -> None:
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            F.cross_entropy(module(x), labels).backward()

    return compare_modules(create_mednext("S", out_channels=4, kernel_size=kernel), run, 3)


def main() -> None:
    parser = make_parser("scripts.bench.depthwise", __doc__, output="cpu-depthwise.json")
    parser.add_argument("--size", type=int, default=32, help="voxels per axis of MedNeXt's patches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for dtype in DTYPES:
        precision = str(dtype).removeprefix("torch.")
        for kind, channels, kernel, stride, size in LAYERS:
            layer = (
                "transposed " * (kind is nn.ConvTranspose3d) + f"kernel {kernel}, stride {stride}"
            )
            name = f"{channels} channels, {layer}, {size}^3, {precision}"
            rows[name] = compare_layer(kind, channels, kernel, stride, size, dtype)
        for kernel in (3, 5):
            name = f"MedNeXt S, kernel {kernel}, 2 x {options.size}^3, {precision}"
            rows[name] = compare_network(kernel, options.size, dtype)
    for name, row in rows.items():
        print(f"{name:60}{row['ratio']:6.1f}x")
    write_results(options.output, {"processor": get_cpu_model(), "rows": rows})


if __name__ == "__main__":
    main()
