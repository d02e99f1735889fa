"""Measure every pooling of conf/pool/ and what else could be used, as ratios to nn.MaxPool3d.

    python scripts/bench_pool.py
    python scripts/bench_pool.py --shape 1 16 65 63 65 --dtype bfloat16 --channels-last
    python scripts/bench_pool.py --device cuda --shape 2 64 320 150 26

Rounds are interleaved: each runs every pooling once, and a ratio is the median over rounds of a
pooling's time over nn.MaxPool3d's in the same round. Compiling is done before. Saved bytes are what
autograd keeps apart from the input, peak bytes what forward and backward allocate at most, both for
each element of the output. On a GPU the bytes that a pooling must move are compared with the
bandwidth of a copy in the same run.
"""

# ruff: noqa: E402
import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
if __name__ == "__main__" and not MALLOC.items() <= os.environ.items():
    # glibc reads these at start; without them page faults are what is timed
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from unet3d.errors import UsageError

BASE = "nn.MaxPool3d"
SHAPES = {
    "cpu": [(1, 16, 64, 64, 64), (1, 8, 320, 150, 26), (1, 16, 65, 63, 65)],
    "cuda": [(2, 64, 320, 150, 26), (2, 64, 321, 151, 27)],
}
Pool = Callable[[Tensor], Tensor]


class Row(NamedTuple):
    """One pooling on one kind of volume; times in seconds, bytes for each output."""

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


def windows_of(x: Tensor) -> Tensor:
    """(B, C, D', H', W', 8)."""
    d, h, w = (n // 2 * 2 for n in x.shape[-3:])
    x = x[..., :d, :h, :w]
    return x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flatten(5)


def unfold_and_sort(x: Tensor) -> Tensor:
    """The usual layer: keeps the order of all elements of all windows."""
    return windows_of(x).sort(-1).values[..., 3:5].mean(-1)


def torch_median(x: Tensor) -> Tensor:
    """torch.median: of the two middle values, the lower."""
    return windows_of(x).median(-1).values


def soft_rank(x: Tensor, tau: float = 0.1) -> Tensor:
    """The usual approximation: the element whose soft rank is nearest to the middle.

    It does not converge to the median as tau -> 0: the middle of K elements has rank (K - 1) / 2,
    which no single element of an even window has, and tied elements (zeros after a ReLU) share one
    average rank, so that another element is nearer to the middle than they are.
    """
    v = windows_of(x)
    rank = torch.sigmoid((v[..., :, None] - v[..., None, :]) / tau).mean(-1)
    return v.gather(-1, (rank - 0.5).abs().argmin(-1, keepdim=True)).squeeze(-1)


def options() -> dict[str, Pool]:
    """Every option of conf/pool/, 2x2x2."""
    files = sorted((ROOT / "conf/pool").glob("*.yaml"))
    return {path.stem: instantiate(OmegaConf.load(path))(2) for path in files}


def baselines() -> dict[str, Pool]:
    """What else there is; nn.MaxPool3d first."""
    return {
        BASE: nn.MaxPool3d(2),
        "nn.MaxPool3d compiled": torch.compile(nn.MaxPool3d(2)),
        "torch.median": torch_median,
        "unfold and sort": unfold_and_sort,
        "soft rank": soft_rank,
    }


AHEAD = 4_000_000
"""Cycles that a GPU waits before it is timed: 2 ms, in which the host queues all that is timed.

Else the host's way to a launch is timed with it, and an operator in Python has the longest."""


class Clock:
    """Seconds between calls of `tick`, on the CPU or by CUDA events."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list = []
        if self.cuda:
            torch.cuda._sleep(AHEAD)

    def tick(self) -> None:
        """Mark a moment."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """The seconds between the marks."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def time_once(pool: Pool, x: Tensor, upper: Tensor) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    x.grad, clock = None, Clock(x.device)
    clock.tick()
    y = pool(x)
    clock.tick()
    y.backward(upper)
    clock.tick()
    forward, backward = clock.spans()
    return forward, backward


def kept(pool: Pool, x: Tensor) -> tuple[int, bool]:
    """Bytes that autograd keeps apart from the input, and whether it keeps the input."""
    storages = {}

    def note(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = pool(x)
    has_input = storages.pop(x.untyped_storage().data_ptr(), None) is not None
    del y
    return sum(storages.values()), has_input


def peak(pool: Pool, x: Tensor, upper: Tensor) -> int:
    """Bytes that a forward and a backward allocate at most, with the output's gradient counted."""
    x.grad = None
    gc.collect()
    if x.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pool(x).backward(upper.clone())
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        pool(x).backward(upper.clone())
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    held = top = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += change
        top = max(top, held)
    return top


def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a copy reads and writes, on a GPU."""
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
    """All poolings on one volume."""
    pools = baselines() | options()
    upper = torch.randn_like(pools[BASE](x))
    memory, times = {}, {name: [] for name in pools}
    for name, pool in list(pools.items()):
        try:
            time_once(pool, x, upper)  # compiles
            memory[name] = (*kept(pool, x), peak(pool, x, upper))
            time_once(pool, x, upper)
        except Exception as error:
            if name == BASE:
                raise
            print(f"{name} left out: {type(error).__name__}", file=sys.stderr)
            del pools[name], times[name]
    spent = dict.fromkeys(pools, 0.0)
    for _ in range(rounds):
        for name, pool in pools.items():
            if spent[name] < budget / len(pools):
                times[name].append(time_once(pool, x, upper))
                spent[name] += sum(times[name][-1])
            elif name == BASE:
                times[name].append(time_once(pool, x, upper))
    rows = []
    for name in pools:
        forward, backward = (median(t) for t in zip(*times[name], strict=True))
        ratios = [
            (f / f0, b / b0, (f + b) / (f0 + b0))
            for (f, b), (f0, b0) in zip(times[name], times[BASE], strict=False)
        ]
        saved, has_input, top = memory[name]
        outputs = upper.numel()
        moved = (x.numel() + outputs) * x.element_size() + saved
        share = [bandwidth and moved / t / bandwidth for t in (forward, backward)]
        rows.append(
            Row(
                name,
                *(forward, backward, median(f + b for f, b in times[name])),
                *(median(column) for column in zip(*ratios, strict=True)),
                *(saved / outputs, has_input, top / outputs),
                *share,
            )
        )
    return rows


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print(f"{'':24}{'forward':>9}{'backward':>9}{'both':>9}{'ms':>9}{'saved':>8}{'peak':>8}")
    for r in rows:
        ratios = f"{r.forward_ratio:9.2f}{r.backward_ratio:9.2f}{r.both_ratio:9.2f}"
        kept = f"{r.saved_bytes:7.1f}{'+' if r.keeps_input else ' '}"
        share = ""
        if r.forward_bandwidth_share is not None and r.backward_bandwidth_share is not None:
            share = f"{r.forward_bandwidth_share:6.0%} {r.backward_bandwidth_share:.0%} of copy"
        print(f"{r.pool:24}{ratios}{r.both * 1e3:9.2f}{kept}{r.peak_bytes:8.1f}{share}")


def draw(results: list[dict], path: Path, device: str) -> None:
    """Time and peak memory: a line for each pooling, a mark for each volume."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    poolings = [row["pool"] for row in results[0]["rows"]][::-1]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, constrained_layout=True)
    panels = zip(
        axes,
        ("both_ratio", "peak_bytes"),
        ("forward + backward, ratio to nn.MaxPool3d", "peak bytes for each output"),
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
    figure.suptitle(f"Poolings of 2x2x2 on {device}: further left is better", fontsize=10)
    figure.savefig(path, dpi=90)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where there is one"
    )
    parser.add_argument(
        "--shape", type=int, nargs=5, metavar=tuple("BCDHW"), help="default: several"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: two")
    parser.add_argument("--channels-last", action="store_true", help="with --shape: this layout")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for each volume, at most about"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    given = parser.parse_args(argv)
    if given.rounds < 1 or (given.shape and min(given.shape) < 1):
        parser.error("--shape and --rounds must be positive")
    if given.shape and min(given.shape[2:]) < 2:
        parser.error("--shape must hold a window of 2x2x2")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device")
    return given


def main() -> None:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    shapes = [tuple(given.shape)] if given.shape else SHAPES[kind]
    cases = [(shape, given.channels_last) for shape in shapes]
    if not given.shape:
        cases.append(((1, 64, 32, 64, 64) if kind == "cpu" else shapes[0], True))
    dtypes = [given.dtype] if given.dtype else ["float32", "bfloat16"]
    bandwidth, results = copy_bandwidth(device), []
    for shape, last in cases:
        for dtype in dtypes:
            layout = torch.channels_last_3d if last else torch.contiguous_format
            x = torch.randn(shape, device=device, dtype=getattr(torch, dtype))
            x = x.contiguous(memory_format=layout).requires_grad_()
            title = f"{'x'.join(map(str, shape))} {dtype}{' channels-last' if last else ''}"
            rows = measure(x, given.rounds, given.seconds, bandwidth)
            show(title, rows)
            case = {"title": title, "shape": shape, "dtype": dtype, "channels_last": last}
            results.append({**case, "rows": [row._asdict() for row in rows]})
    report = {
        "device": name,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "results": results,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    stem = given.output / f"{name.lower().replace(' ', '-')}-pool"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    draw(results, stem.with_suffix(".png"), name)
    print(f"\nwrote {stem}.json and .png")


def processor() -> str:
    """The CPU's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError) as error:
        sys.exit(f"bench_pool: {error}")
