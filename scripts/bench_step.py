"""One training step, ours beside what a user would pick instead: predicted peaks, and time.

    pip install '.[peers]'                    # nnU-Net's and pytorch-3dunet's networks
    python scripts/bench_step.py predict      # peaks at the forum's job, for CUDA; no GPU needed
    python scripts/bench_step.py time         # seconds and peaks, interleaved, on this machine

All networks have the same channels at every level and see the same volumes. Results go into
benchmarks/<name>-step.json, and with `time` a picture of time against peak beside it.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from unet3d.inference.sliding_window import SlidingWindow  # noqa: E402
from unet3d.loss.dice_ce import DiceCE  # noqa: E402
from unet3d.memory.batch_search import BatchExtrapolation, search_largest_batch  # noqa: E402
from unet3d.memory.estimate import MemoryEstimate, estimate_step  # noqa: E402
from unet3d.memory.trace import Trace  # noqa: E402
from unet3d.model.unet import UNet3D  # noqa: E402
from unet3d.model.unet_reference import ForumUNet3D  # noqa: E402
from unet3d.pool.max import MaxPool3d  # noqa: E402
from unet3d.units import MIB  # noqa: E402
from unet3d.workflows.memory.training_step import HALF, TrainingStep  # noqa: E402

RUNGS = ("none", "skips", "lean", "leanest")
AS_WRITTEN = "as written"
SMALL, LARGE = [1, 2, 4, 4], [1, 2, 4, 8, 8]  # times the width
Make = Callable[[], nn.Module]


def ours(channels: list[int], rung: str, **choices: Any) -> nn.Module:
    """Our network on a rung of the ladder."""
    model = UNet3D(in_channels=1, num_classes=5, channels=channels, pool=MaxPool3d, **choices)
    strategy = instantiate(OmegaConf.load(ROOT / "conf" / "checkpointing" / f"{rung}.yaml"))
    strategy.apply(model)
    return model


def peers(c: list[int]) -> Iterator[tuple[str, Make]]:
    """What a user would pick instead, with the same channels; those that are installed."""
    from monai.networks.nets.basic_unet import BasicUNet
    from monai.networks.nets.dynunet import DynUNet

    def basic() -> nn.Module:
        return BasicUNet(3, 1, 5, features=(*c, c[-1], c[0]))

    def dynunet() -> nn.Module:
        n = len(c)
        return DynUNet(
            3, 1, 5, [3] * n, [1] + [2] * (n - 1), [2] * (n - 1), filters=c, norm_name="instance"
        )

    yield "MONAI DynUNet", dynunet
    yield "MONAI BasicUNet, a level more", basic
    if find_spec("dynamic_network_architectures"):
        from dynamic_network_architectures.architectures.unet import PlainConvUNet

        def plain_conv() -> nn.Module:
            n = len(c)
            return PlainConvUNet(
                *(1, n, c, nn.Conv3d, 3, [1] + [2] * (n - 1), 2, 5, 2),
                conv_bias=True,
                norm_op=nn.InstanceNorm3d,
                norm_op_kwargs={"affine": True},
                nonlin=nn.LeakyReLU,
                nonlin_kwargs={"inplace": True},
            )

        yield "nnU-Net PlainConvUNet", plain_conv
    if find_spec("pytorch3dunet"):
        from pytorch3dunet.unet3d.model import UNet3D as Wolny

        def wolny() -> nn.Module:
            return Wolny(1, 5, final_sigmoid=False, f_maps=c, num_groups=8, is_segmentation=False)

        yield "pytorch-3dunet UNet3D", wolny


def step(make: Make, size: list[int], batch: int, precision: str, device: str) -> TrainingStep:
    """A step as Lightning runs it, with AdamW and our Dice + CE for everybody."""
    model = make().train()
    if device != "cpu":
        model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return TrainingStep(
        model=model,
        loss=DiceCE().to(device),
        optimizer=optimizer,
        infer=SlidingWindow([16, 16, 16]),
        patch=size,
        volume=[16, 16, 16],
        batch_size=batch,
        channels=1,
        micro_batches=1,
        clip=None,
        autocast=HALF.get(precision),
        dtype=torch.float32,
        device=device,
    )


class Training:
    """A step of which the meter sees no validation: some networks take no small volumes."""

    def __init__(self, inner: TrainingStep):
        self.model, self.inner = inner.model, inner

    def train(self, trace: Trace) -> None:
        """One optimizer step."""
        self.inner.train(trace)

    def validate(self, trace: Trace) -> None:
        """There is nothing to validate."""


def predicted(
    make: Make, size: list[int], batch: int, precision: str, *, cuda: bool
) -> MemoryEstimate:
    """What a step takes."""

    def made() -> Training:
        inner = step(make, size, batch, precision, "cpu")
        for group in inner.optimizer.param_groups:
            group["foreach"] = cuda or None
        return Training(inner)

    return estimate_step(made, cuda=cuda)


def mib(nbytes: int | None) -> int:
    """In MiB."""
    return round((nbytes or 0) / MIB)


def work(make: Make, size: list[int]) -> int:
    """Floating point operations of a step's convolutions and matrix products."""
    with FakeTensorMode():
        one = step(make, size, 1, "32", "cpu")
        with FlopCounterMode(display=False) as counter:
            one.train(Trace(cuda=False))
    return counter.get_total_flops()


def forum_nets(name: str, width: int = 64) -> dict[str, Make]:
    """The forum's `small` or `large` network as it is written, and ours on every rung."""
    shape, dec = {"small": (SMALL, [4, 2, 1]), "large": (LARGE, [4, 2, 1, 1])}[name]
    enc, decoder = [width * n for n in shape], [width * n for n in dec]
    nets: dict[str, Make] = {
        AS_WRITTEN: partial(ForumUNet3D, in_channels=1, num_classes=5, encoder=enc, decoder=decoder)
    }
    return nets | {
        rung: partial(ours, enc, rung, decoder_channels=decoder[::-1])
        for rung in (*RUNGS, "offload", "blocks")
    }


def forum() -> dict[str, Any]:
    """The forum's two networks at its size and batch: every rung, and the largest batch."""
    size, rows = [320, 150, 26], {}
    for name in ("small", "large"):
        nets = forum_nets(name)
        base = work(nets[AS_WRITTEN], size)
        for rung, make in nets.items():
            two, three = (predicted(make, size, n, "16", cuda=True) for n in (2, 3))
            any_batch = BatchExtrapolation(two, three)
            fits = search_largest_batch(any_batch, 7000 * MIB) if any_batch.affine else None
            rows[f"{name}, {rung}"] = {
                "peak_allocated_mib": mib(two.peak.allocated),
                "peak_reserved_mib": mib(two.peak.reserved),
                "extra_work": round(work(make, size) / base - 1, 3),
                "largest_batch_in_7000_mib": fits,
            }
            print(name, rung, rows[f"{name}, {rung}"], flush=True)
    return {"size": size, "batch": 2, "precision": "16", "optimizer": "AdamW", "rows": rows}


def nets_beside_peers(width: int = 64) -> dict[str, Make]:
    """Ours, built as the peers are, and the peers that are installed."""
    channels = [width * n for n in SMALL]
    nets: dict[str, Make] = {
        f"ours, {rung}": partial(
            ours, channels, rung, norm="instance", activation="leaky_relu", upsampling="transposed"
        )
        for rung in RUNGS
    }
    return nets | dict(peers(channels))


def beside_peers() -> dict[str, Any]:
    """The peers at 2 x 1 x 320 x 160 x 32, which all of them take."""
    size, channels, rows = [320, 160, 32], [64, 128, 256, 256], {}
    for name, make in nets_beside_peers().items():
        made = predicted(make, size, 2, "16", cuda=True)
        rows[name] = {"peak_allocated_mib": mib(made.peak.allocated)}
        print(name, rows[name], flush=True)
    return {"size": size, "batch": 2, "channels": channels, "precision": "16", "rows": rows}


def huge() -> dict[str, Any]:
    """A volume of 512 x 512 x 256 as a whole, the small network, bf16."""
    size, rows = [512, 512, 256], {}
    for rung in RUNGS:
        make = partial(ours, [64, 128, 256, 256], rung)
        made = predicted(make, size, 1, "bf16", cuda=True)
        rows[rung] = {
            "peak_allocated_gib": mib(made.peak.allocated) / 1024,
            "peak_reserved_gib": mib(made.peak.reserved) / 1024,
        }
        print("512 x 512 x 256", rung, rows[rung], flush=True)
    return {"size": size, "batch": 1, "precision": "bf16", "rows": rows}


def timed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every network in turn, round after round, so that a machine's moods meet all of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(arguments.threads)
    channels = [arguments.width * n for n in SMALL]
    decoder = channels[:3][::-1]
    nets: dict[str, Make] = {
        AS_WRITTEN: partial(
            ForumUNet3D, in_channels=1, num_classes=5, encoder=channels, decoder=decoder
        )
    }
    nets |= {
        f"ours, {rung}": partial(ours, channels, rung) for rung in (*RUNGS, "offload", "blocks")
    }
    nets |= dict(peers(channels))
    rows: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in nets}
    for n in range(arguments.rounds + 1):
        for name, make in nets.items():
            torch.manual_seed(0)
            one = step(make, arguments.size, arguments.batch, arguments.precision, device)
            one.train(Silent())  # the first step makes the optimizer's state
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            one.train(Silent())
            if device == "cuda":
                torch.cuda.synchronize()
                rows.setdefault(name, {})["peak_allocated_mib"] = round(
                    torch.cuda.max_memory_allocated() / MIB
                )
            if n:
                seconds[name].append(time.perf_counter() - begun)
            del one
            gc.collect()
    for name, make in nets.items():
        made = predicted(
            make, arguments.size, arguments.batch, arguments.precision, cuda=device == "cuda"
        )
        rows.setdefault(name, {})["predicted_peak_mib"] = mib(made.peak.allocated)
        rows[name]["median_seconds"] = statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[name], seconds[AS_WRITTEN], strict=True)]
        rows[name]["time_ratio"] = round(statistics.median(ratios), 3)
        print(name, rows[name], flush=True)
    return {
        **{"size": arguments.size, "batch": arguments.batch, "channels": channels},
        **{"precision": arguments.precision, "threads": arguments.threads, "device": device},
        **{"rounds": arguments.rounds, "torch": torch.__version__, "rows": rows},
    }


class Silent:
    """Hears of a step and does nothing, so that nothing but the step is timed."""

    def begin_phase(self, phase: str) -> None:
        """A phase begins."""

    def label(self, tensors: Any, kind: str) -> None:
        """These tensors are of that kind."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Time against peak: our ladder as a curve, the others as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=110, layout="constrained")
    rows = result["rows"]
    key = "peak_allocated_mib" if result["device"] == "cuda" else "predicted_peak_mib"
    ladder = [rows[f"ours, {rung}"] for rung in RUNGS]
    axes.plot([r[key] for r in ladder], [r["time_ratio"] for r in ladder], "o-", color="#c1272d")
    right = 1.45 * max(r[key] for r in rows.values())
    taken: list[tuple[float, float]] = []  # where labels are
    for name, row in sorted(rows.items(), key=lambda item: item[1]["time_ratio"]):
        x, y = row[key], row["time_ratio"]
        if name not in [f"ours, {rung}" for rung in RUNGS]:
            axes.plot(x, y, "s", color="#44546a")
        label = y
        for at_x, at_y in taken:
            if abs(at_x - x) < 0.3 * right and label < at_y + 0.07:
                label = at_y + 0.07
        taken.append((x, label))
        colour = "#c1272d" if name.startswith("ours") else "#44546a"
        axes.text(x + 0.015 * right, label, name, fontsize=8, color=colour, va="center")
    axes.set_xlabel("peak of a training step, MiB" + (" (predicted)" if "pred" in key else ""))
    axes.set_ylabel("time of a step, as written = 1")
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.15 * max(r["time_ratio"] for r in rows.values()))
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("predict", "time"))
    parser.add_argument("--name", default="cpu", help="of the result file")
    parser.add_argument("--size", type=int, nargs=3, default=[96, 64, 32])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--precision", choices=("32", "16", "bf16"), default="32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    path = ROOT / "benchmarks" / f"{arguments.name}-step.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    if arguments.part == "predict":
        results["predicted"] = {"forum": forum(), "peers": beside_peers(), "huge": huge()}
    else:
        key = f"time, {arguments.precision}"
        results[key] = timed(arguments)
        draw(results[key], path.with_suffix(".png"))
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
