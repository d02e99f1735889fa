"""Compare the pooling methods of conf/pool/ and their alternatives with nn.MaxPool3d.

    python -m scripts.bench.pool
    python -m scripts.bench.pool --shape 1 16 65 63 65 --dtype bfloat16 --channels-last
    python -m scripts.bench.pool --device cuda --shape 2 64 320 150 26

Rounds are interleaved: each round runs every method once. A ratio is the median over rounds of a
method's time divided by the time of nn.MaxPool3d in the same round; compilation is not timed.
Bytes are per element of the output: `saved` is what autograd saves besides the input, `peak` is the
most that forward and backward allocate. On a GPU, the bytes that a method must move are compared
with the bandwidth of a copy in the same run.
"""

# ruff: noqa: E402
import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
if __name__ == "__main__" and not MALLOC.items() <= os.environ.items():
    # glibc reads these when a process starts; without them, page faults dominate the times
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **MALLOC})

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from unet3d.errors import UsageError
from unet3d.machine.system import get_cpu_model

ROOT = Path(__file__).resolve().parents[2]
BASE = "nn.MaxPool3d"
SHAPES = {
    "cpu": [(1, 16, 64, 64, 64), (1, 8, 320, 150, 26), (1, 16, 65, 63, 65)],
    "cuda": [(2, 64, 320, 150, 26), (2, 64, 321, 151, 27)],
}
Pool = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A volume that all pooling methods are measured on."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool

    @property
    def title(self) -> str:
        """The name of the case in results."""
        layout = " channels-last" if self.channels_last else ""
        return f"{'x'.join(map(str, self.shape))} {self.dtype}{layout}"

    def make_input(self, device: torch.device) -> Tensor:
        """Draw a random volume that requires gradients."""
        layout = torch.channels_last_3d if self.channels_last else torch.contiguous_format
        x = torch.randn(self.shape, device=device, dtype=getattr(torch, self.dtype))
        return x.contiguous(memory_format=layout).requires_grad_()


class Row(NamedTuple):
    """One pooling method on one volume: times in seconds, bytes per element of the output."""

    pool: str
    forward: float
    backward: float
    both: float
    forward_ratio: float
    backward_ratio: float
    both_ratio: float
    saved_bytes: float
    keeps_input: bool
    peak_bytes: float
    forward_bandwidth_share: float | None
    backward_bandwidth_share: float | None


def unfold_windows(x: Tensor) -> Tensor:
    """Return the 2x2x2 windows: (B, C, D // 2, H // 2, W // 2, 8)."""
    d, h, w = (n // 2 * 2 for n in x.shape[-3:])
    x = x[..., :d, :h, :w]
    return x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flatten(5)


def unfold_and_sort(x: Tensor) -> Tensor:
    """Take the median as most implementations do: autograd saves the order of all elements."""
    return unfold_windows(x).sort(-1).values[..., 3:5].mean(-1)


def torch_median(x: Tensor) -> Tensor:
    """Take the lower of the two middle values with torch.median."""
    return unfold_windows(x).median(-1).values


def soft_rank(x: Tensor, tau: float = 0.1) -> Tensor:
    """Approximate the median by the element whose soft rank is closest to the middle.

    This does not converge to the median as tau -> 0: the middle of K elements has rank (K - 1) / 2,
    which no element of an even window has, and tied elements (zeros after a ReLU) share one average
    rank, so another element can be closer to the middle than they are.
    """
    v = unfold_windows(x)
    rank = torch.sigmoid((v[..., :, None] - v[..., None, :]) / tau).mean(-1)
    return v.gather(-1, (rank - 0.5).abs().argmin(-1, keepdim=True)).squeeze(-1)


def load_poolings() -> dict[str, Pool]:
    """Instantiate every option of conf/pool/ with 2x2x2 windows."""
    files = sorted((ROOT / "conf/pool").glob("*.yaml"))
    return {path.stem: instantiate(OmegaConf.load(path))(2) for path in files}


def build_alternatives() -> dict[str, Pool]:
    """Return what could be used instead; nn.MaxPool3d first."""
    return {
        BASE: nn.MaxPool3d(2),
        "nn.MaxPool3d compiled": torch.compile(nn.MaxPool3d(2)),
        "torch.median": torch_median,
        "unfold and sort": unfold_and_sort,
        "soft rank": soft_rank,
    }


HEAD_START_CYCLES = 4_000_000
"""Cycles that a GPU waits before it is timed: 2 ms, in which the host queues what is timed.

Without it, the launch overhead of the host would be timed as well, which is largest for operators
written in Python."""


class Clock:
    """Measures the seconds between calls of `tick`; on a GPU, by CUDA events."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list = []
        if self.cuda:
            torch.cuda._sleep(HEAD_START_CYCLES)

    def tick(self) -> None:
        """Record the time."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Return the seconds between consecutive ticks."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def time_once(pool: Pool, x: Tensor, grad_output: Tensor) -> tuple[float, float]:
    """Return the seconds of one forward and one backward."""
    x.grad, clock = None, Clock(x.device)
    clock.tick()
    y = pool(x)
    clock.tick()
    y.backward(grad_output)
    clock.tick()
    forward, backward = clock.spans()
    return forward, backward


def measure_saved(pool: Pool, x: Tensor) -> tuple[int, bool]:
    """Return the bytes that autograd saves besides the input, and whether it saves the input."""
    storages = {}

    def record(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        y = pool(x)
    keeps_input = storages.pop(x.untyped_storage().data_ptr(), None) is not None
    del y
    return sum(storages.values()), keeps_input


def measure_peak(pool: Pool, x: Tensor, grad_output: Tensor) -> int:
    """Return the peak bytes of a forward and a backward, including the gradient of the output."""
    x.grad = None
    gc.collect()
    if x.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pool(x).backward(grad_output.clone())
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        pool(x).backward(grad_output.clone())
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    allocated = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        allocated += change
        peak = max(peak, allocated)
    return peak


def measure_copy_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second that a copy on a GPU reads and writes; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(20):
        clock = Clock(device)
        clock.tick()
        target.copy_(source)
        clock.tick()
        seconds += clock.spans()
    return 2 * source.numel() / median(seconds)


def measure(x: Tensor, rounds: int, budget: float, bandwidth: float | None) -> list[Row]:
    """Measure all pooling methods on one volume, in about `budget` seconds."""
    pools = build_alternatives() | load_poolings()
    grad_output = torch.randn_like(pools[BASE](x))
    memory, times = {}, {name: [] for name in pools}
    for name, pool in list(pools.items()):
        try:
            time_once(pool, x, grad_output)  # compiles
            memory[name] = (*measure_saved(pool, x), measure_peak(pool, x, grad_output))
            time_once(pool, x, grad_output)
        except Exception as error:
            if name == BASE:
                raise
            print(f"{name} skipped: {type(error).__name__}: {error}", file=sys.stderr)
            del pools[name], times[name]
    spent = dict.fromkeys(pools, 0.0)
    for _ in range(rounds):
        for name, pool in pools.items():
            if spent[name] < budget / len(pools):
                times[name].append(time_once(pool, x, grad_output))
                spent[name] += sum(times[name][-1])
            elif name == BASE:
                times[name].append(time_once(pool, x, grad_output))
    rows = []
    for name in pools:
        forward, backward = (median(t) for t in zip(*times[name], strict=True))
        ratios = [
            (f / f0, b / b0, (f + b) / (f0 + b0))
            for (f, b), (f0, b0) in zip(times[name], times[BASE], strict=False)
        ]
        saved, keeps_input, peak = memory[name]
        outputs = grad_output.numel()
        moved = (x.numel() + outputs) * x.element_size() + saved
        share = [bandwidth and moved / t / bandwidth for t in (forward, backward)]
        rows.append(
            Row(
                name,
                *(forward, backward, median(f + b for f, b in times[name])),
                *(median(column) for column in zip(*ratios, strict=True)),
                *(saved / outputs, keeps_input, peak / outputs),
                *share,
            )
        )
    return rows


def print_table(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print(f"{'':24}{'forward':>9}{'backward':>9}{'both':>9}{'ms':>9}{'saved':>8}{'peak':>8}")
    for r in rows:
        ratios = f"{r.forward_ratio:9.2f}{r.backward_ratio:9.2f}{r.both_ratio:9.2f}"
        saved = f"{r.saved_bytes:7.1f}{'+' if r.keeps_input else ' '}"
        share = ""
        if r.forward_bandwidth_share is not None and r.backward_bandwidth_share is not None:
            share = f"{r.forward_bandwidth_share:6.0%} {r.backward_bandwidth_share:.0%} of copy"
        print(f"{r.pool:24}{ratios}{r.both * 1e3:9.2f}{saved}{r.peak_bytes:8.1f}{share}")


def plot(results: list[dict], path: Path, device: str) -> None:
    """Plot time and peak memory: a row for each pooling method, a marker for each volume."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    poolings = [row["pool"] for row in results[0]["rows"]][::-1]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, constrained_layout=True)
    panels = zip(
        axes,
        ("both_ratio", "peak_bytes"),
        ("forward + backward, ratio to nn.MaxPool3d", "peak bytes per output element"),
        strict=True,
    )
    for axis, key, label in panels:
        for i, result in enumerate(results):
            rows = result["rows"]
            axis.plot(
                [row[key] for row in rows],
                [poolings.index(row["pool"]) for row in rows],
                linestyle="none",
                marker="o^sDv<>P"[i % 8],
                color="C0" if result["dtype"] == "float32" else "C1",
                markersize=5,
                alpha=0.7,
                label=result["title"],
            )
        axis.set(xscale="log", xlabel=label)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.grid(color="0.9")
    axes[0].set_yticks(range(len(poolings)), poolings)
    axes[0].axvline(1, color="0.5", linewidth=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.suptitle(f"2x2x2 pooling on {device} (lower is better)", fontsize=10)
    figure.savefig(path, dpi=90)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.pool",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if available")
    parser.add_argument(
        "--shape", type=int, nargs=5, metavar=tuple("BCDHW"), help="default: several shapes"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: float32 and bfloat16",
    )
    parser.add_argument("--channels-last", action="store_true", help="memory layout of --shape")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="approximate time limit for each volume"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks", help="folder of the results"
    )
    options = parser.parse_args(argv)
    if options.rounds < 1 or (options.shape and min(options.shape) < 1):
        parser.error("--shape and --rounds must be positive")
    if options.shape and min(options.shape[2:]) < 2:
        parser.error("--shape must be at least 2x2x2 voxels")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device")
    return options


def main() -> None:
    options = parse_arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    shapes = [tuple(options.shape)] if options.shape else SHAPES[kind]
    layouts = [(shape, options.channels_last) for shape in shapes]
    if not options.shape:
        layouts.append(((1, 64, 32, 64, 64) if kind == "cpu" else shapes[0], True))
    dtypes = [options.dtype] if options.dtype else ["float32", "bfloat16"]
    cases = [Case(shape, dtype, last) for shape, last in layouts for dtype in dtypes]
    bandwidth, results = measure_copy_bandwidth(device), []
    for case in cases:
        rows = measure(case.make_input(device), options.rounds, options.seconds, bandwidth)
        print_table(case.title, rows)
        results.append(
            {"title": case.title, **case._asdict(), "rows": [row._asdict() for row in rows]}
        )
    report = {
        "device": name,
        "processor": get_cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "results": results,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"{name.lower().replace(' ', '-')}-pool"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plot(results, stem.with_suffix(".png"), name)
    print(f"\nwrote {stem}.json and .png")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        sys.exit(f"scripts.bench.pool: {error}")
