"""Compare the pooling methods of conf/pool/ and their alternatives with nn.MaxPool3d.

    python -m scripts.bench.pool    # on a CPU; `make gpu` measures them on a GPU

Rounds are interleaved: each round runs every method once. A ratio is the median over rounds of a
method's time divided by the time of nn.MaxPool3d in the same round; compilation is not timed.
Bytes are per element of the output: `saved` is what autograd saves besides the input, `peak` is the
most that forward and backward allocate.
"""

# ruff: noqa: E402
import gc
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

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

from scripts.bench.results import ROOT, follow_memory, make_parser, write_results
from unet3d.machine import get_cpu_model

BASE = "nn.MaxPool3d"
Pool = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A volume that all pooling methods are measured on."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    channels_last: bool = False

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


SHAPES = [
    *(((1, 16, 64, 64, 64), False), ((1, 8, 320, 150, 26), False), ((1, 16, 65, 63, 65), False)),
    ((1, 64, 32, 64, 64), True),
]
"""Volumes, and whether they are channels-last."""

DTYPES = ("float32", "bfloat16")


def unfold_windows(x: Tensor) -> Tensor:
    """Return the 2x2x2 windows: (B, C, D // 2, H // 2, W // 2, 8)."""
    d, h, w = (n // 2 * 2 for n in x.shape[-3:])
    x = x[..., :d, :h, :w]
    return x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flatten(5)


def unfold_and_sort(x: Tensor) -> Tensor:
    """Take the median as most implementations do: autograd saves the order of all elements."""
    return unfold_windows(x).sort(-1).values[..., 3:5].mean(-1)


def soft_rank(x: Tensor, tau: float = 0.1) -> Tensor:
    """Approximate the median by the element whose soft rank is closest to the middle.

    This does not converge to the median as tau -> 0: the middle of K elements has rank (K - 1) / 2,
    which no element of an even window has, and tied elements (zeros after a ReLU) share one average
    rank, so another element can be closer to the middle than they are.
    """
    v = unfold_windows(x)
    rank = torch.sigmoid((v[..., :, None] - v[..., None, :]) / tau).mean(-1)
    return v.gather(-1, (rank - 0.5).abs().argmin(-1, keepdim=True)).squeeze(-1)


def build_poolings() -> dict[str, Pool]:
    """Return what could be used instead, nn.MaxPool3d first, and the options of conf/pool/."""
    alternatives = {
        BASE: nn.MaxPool3d(2),
        "unfold and sort": unfold_and_sort,
        "soft rank": soft_rank,
    }
    files = sorted((ROOT / "conf/pool").glob("*.yaml"))
    options = {path.stem: OmegaConf.load(path) for path in files if path.stem != "strided"}
    return alternatives | {name: instantiate(option)(2) for name, option in options.items()}


HEAD_START_CYCLES = 4_000_000
"""Cycles that a GPU waits before it is timed: 2 ms, in which the host queues what is timed.

Without it, the launch overhead of the host would be timed as well, which is largest for operators
written in Python."""


def time_calls(device: torch.device, *calls: Callable[[], Any]) -> list[float]:
    """Return the seconds of each of several consecutive calls; on a GPU, by CUDA events."""
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]
    torch.cuda._sleep(HEAD_START_CYCLES)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def time_once(pool: Pool, x: Tensor, grad_output: Tensor) -> tuple[float, float]:
    """Return the seconds of one forward and one backward."""
    outputs: list[Tensor] = []
    x.grad = None
    forward, backward = time_calls(
        x.device, lambda: outputs.append(pool(x)), lambda: outputs[0].backward(grad_output)
    )
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
    return max(in_use for _, in_use in follow_memory(profiler))


def measure(x: Tensor, rounds: int, budget: float) -> dict[str, dict[str, Any]]:
    """Measure all pooling methods on one volume, in about `budget` seconds.

    Times are in seconds, bytes per element of the output.
    """
    pools = build_poolings()
    grad_output = torch.randn_like(pools[BASE](x))
    memory, times = {}, {name: [] for name in pools}
    for name, pool in pools.items():
        time_once(pool, x, grad_output)  # compiles
        memory[name] = (*measure_saved(pool, x), measure_peak(pool, x, grad_output))
        time_once(pool, x, grad_output)
    for _ in range(rounds):
        for name, pool in pools.items():
            if name == BASE or sum(map(sum, times[name])) < budget / len(pools):
                times[name].append(time_once(pool, x, grad_output))
    rows, outputs = {}, grad_output.numel()
    for name in pools:
        forward, backward = (median(t) for t in zip(*times[name], strict=True))
        pairs = list(zip(times[name], times[BASE], strict=False))
        saved, keeps_input, peak = memory[name]
        rows[name] = {
            "pool": name,
            "forward": forward,
            "backward": backward,
            "both": median(map(sum, times[name])),
            "forward_ratio": median(own[0] / base[0] for own, base in pairs),
            "backward_ratio": median(own[1] / base[1] for own, base in pairs),
            "both_ratio": median(sum(own) / sum(base) for own, base in pairs),
            "saved_bytes": saved / outputs,
            "keeps_input": keeps_input,
            "peak_bytes": peak / outputs,
        }
    return rows


def main() -> None:
    parser = make_parser("scripts.bench.pool", __doc__, output="cpu-pool.json")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="about, for each volume")
    options = parser.parse_args()
    results = []
    for shape, last, dtype in ((*shape, dtype) for shape in SHAPES for dtype in DTYPES):
        case = Case(shape, dtype, last)
        rows = measure(case.make_input(torch.device("cpu")), options.rounds, options.seconds)
        for row in rows.values():
            print(f"{case.title:40}{row['pool']:24}{row['both_ratio']:9.2f}x", flush=True)
        results.append({"title": case.title, **case._asdict(), "rows": list(rows.values())})
    report = {"processor": get_cpu_model(), "threads": torch.get_num_threads(), "results": results}
    write_results(options.output, {"device": "cpu", **report})


if __name__ == "__main__":
    main()
