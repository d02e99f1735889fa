"""Estimate the memory of training steps, also of other projects' networks.

    pip install '.[peers]'              # networks of nnU-Net and pytorch-3dunet
    python -m scripts.bench.step        # estimated CUDA peaks; needs no GPU

All networks have the same channels at every level and get the same volumes. Peaks are those of a
GPU of compute capability 9.0, as the H100 that they are compared with; what fits smaller GPUs is
estimated for those. Results are written to benchmarks/cpu-step.json, as are the times that
scripts.bench.step_times measures.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from scripts.bench.results import ROOT, make_parser, write_results
from unet3d.config.compose import compose_config
from unet3d.custom_ops import simulate_cuda
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.loss.overlap import DiceCE
from unet3d.machine import AUTOCAST_TYPES
from unet3d.memory.batches import BatchExtrapolation
from unet3d.memory.estimate import MemoryEstimate, add_context_bytes, trace_step
from unet3d.memory.fake_tensors import enable_foreach
from unet3d.memory.fit import FUSED_STRATEGIES, estimate_configured_step
from unet3d.memory.trace import Trace
from unet3d.memory.traced_step import TracedStep
from unet3d.model.plain_unet import PlainUNet3D
from unet3d.model.unet import UNet3D
from unet3d.pool.max import MaxPool3d
from unet3d.text import MIB
from unet3d.training.config import parse_train_config

PLAIN = "plain modules"
STRATEGIES = (PLAIN, *FUSED_STRATEGIES, "blocks")
FITTED = ("none", "fused", "lean", "leanest")
SMALL, LARGE = [1, 2, 4, 4], [1, 2, 4, 8, 8]  # times the width
Factory = Callable[[], nn.Module]
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.99, nesterov=True)
"""The optimizer of nnU-Net."""
FORUM_SIZE, PEERS_SIZE = [320, 150, 26], [320, 160, 32]
GPU_MEMORY = 7000 * MIB
"""Memory of the GPU in the forum thread, as nvidia-smi reports it."""
CHANNELS_LAST = ", channels-last"
VARIANTS = {
    CHANNELS_LAST: (True, False),
    ", compiled": (False, True),
    f"{CHANNELS_LAST}, compiled": (True, True),
}
"""How plain modules run faster, after their name: (channels-last, compiled)."""


def build_ours(channels: list[int], strategy: str, **options: Any) -> nn.Module:
    """Build our network with a checkpointing strategy of conf/checkpointing/, or without one."""
    defaults: dict[str, Any] = {"in_channels": 1, "num_classes": 5, "pool": MaxPool3d}
    model = UNet3D(channels=channels, **{**defaults, **options})
    option = "none" if strategy == PLAIN else strategy
    config = OmegaConf.load(ROOT / "conf" / "checkpointing" / f"{option}.yaml")
    instantiate(config).apply(model)
    return model


def list_peers(c: list[int]) -> Iterator[tuple[str, Factory]]:
    """Yield the installed networks of other projects, with these channels."""
    with patch.dict(os.environ):  # MONAI sets CUBLAS_WORKSPACE_CONFIG, which enlarges estimates
        from monai.networks.nets.basic_unet import BasicUNet
        from monai.networks.nets.dynunet import DynUNet

    kernels, strides = [3] * len(c), [1] + [2] * (len(c) - 1)
    sizes = (3, 1, 5, kernels, strides, strides[1:])
    yield "MONAI DynUNet", partial(DynUNet, *sizes, filters=c, norm_name="instance")
    features = (*c, c[-1], c[0])
    yield "MONAI BasicUNet, a level more", partial(BasicUNet, 3, 1, 5, features=features)
    if find_spec("dynamic_network_architectures"):
        from scripts.bench.networks import NnUNet

        options: Any = {"kernel_size": kernels, "strides": strides, "filters": c}
        yield "nnU-Net PlainConvUNet", partial(NnUNet, in_channels=1, out_channels=5, **options)
    if find_spec("pytorch3dunet"):
        from pytorch3dunet.unet3d.model import UNet3D as Wolny

        options = {"final_sigmoid": False, "num_groups": 8, "is_segmentation": False}
        yield "pytorch-3dunet UNet3D", partial(Wolny, 1, 5, f_maps=c, **options)


def list_variants(name: str, make: Factory) -> dict[str, Factory]:
    """Return a network of plain modules in the ways of VARIANTS."""
    return {
        name + variant: partial(build_variant, make, *ways) for variant, ways in VARIANTS.items()
    }


def build_variant(make: Factory, channels_last: bool, compiled: bool) -> nn.Module:
    """Build a network whose weights are channels-last, so that its convolutions are, or compile it.

    The input has one channel, so both memory formats describe it.
    """
    model: Any = make()  # the types of Module.to() have no memory_format
    if channels_last:
        model.to(memory_format=torch.channels_last_3d)
    if compiled:
        torch.compiler.reset()  # another network of this class does not count as a recompilation
        model.compile()
    return model


def build_step(
    make: Factory, size: list[int], batch: int, precision: str, device: str
) -> TracedStep:
    """Build a step as Lightning runs it, with AdamW and Dice + CE for every network."""
    model = make().train()
    if device != "cpu":
        model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return TracedStep(
        model=model,
        loss=DiceCE().to(device),
        optimizer=optimizer,
        sliding_window=SlidingWindow([16, 16, 16]),
        batch_shape=(batch, 1, *size),
        volume_shape=(1, 1, 16, 16, 16),
        autocast=AUTOCAST_TYPES.get(precision),
        device=device,
    )


def build_cuda_step(make: Factory, size: list[int], batch: int, precision: str) -> TracedStep:
    """Build a step on fake CPU tensors with torch's choice of optimizer on CUDA."""
    step = build_step(make, size, batch, precision, "cpu")
    enable_foreach(step.optimizer)
    return step


def estimate(
    make: Factory, size: list[int], batch: int, precision: str, *, cuda: bool
) -> MemoryEstimate:
    """Estimate the memory of a step, without validation: some networks reject small volumes."""
    build = build_cuda_step if cuda else partial(build_step, device="cpu")
    step = partial(build, make, size, batch, precision)
    return trace_step(step, cuda=cuda, validates=False)


def to_mib(nbytes: int | None) -> int:
    """Convert bytes to whole MiB."""
    return round((nbytes or 0) / MIB)


def count_flops(make_step: Callable[[], TracedStep]) -> int:
    """Count the floating point operations of a step's convolutions."""
    with FakeTensorMode():
        step = make_step()
        with FlopCounterMode(display=False) as counter:
            step.train(Trace(cuda=False))
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "conv" in str(operation))


def list_forum_networks(name: str, width: int = 64) -> dict[str, Factory]:
    """Return experiment=example_<name>'s network in plain modules, and ours with each strategy."""
    shape, dec = {"small": (SMALL, [4, 2, 1]), "large": (LARGE, [4, 2, 1, 1])}[name]
    enc, decoder = [width * n for n in shape], [width * n for n in dec]
    networks: dict[str, Factory] = {
        PLAIN: partial(PlainUNet3D, in_channels=1, num_classes=5, encoder=enc, decoder=decoder)
    }
    return networks | {
        strategy: partial(build_ours, enc, strategy, decoder_channels=decoder[::-1])
        for strategy in STRATEGIES[1:]
    }


def predict_forum() -> dict[str, Any]:
    """Estimate peaks and largest batches of forum_small and forum_large, with each strategy."""
    size, rows = FORUM_SIZE, {}
    for name in ("small", "large"):
        networks = list_forum_networks(name)
        flops = {
            strategy: count_flops(partial(build_step, make, size, 1, "32", "cpu"))
            for strategy, make in networks.items()
        }
        for strategy, make in networks.items():
            two, three = (estimate(make, size, n, "16", cuda=True) for n in (2, 3))
            any_batch = BatchExtrapolation(two, three)
            largest = any_batch.find_largest(GPU_MEMORY) if any_batch.affine else None
            rows[f"{name}, {strategy}"] = {
                "peak_allocated_mib": to_mib(two.peak.allocated),
                "peak_reserved_mib": to_mib(two.peak.reserved),
                "extra_work": round(flops[strategy] / flops[PLAIN] - 1, 3),
                "largest_batch_in_7000_mib": largest,
            }
    return {"size": size, "batch": 2, "precision": "16", "optimizer": "AdamW", "rows": rows}


def list_comparable_networks(width: int = 64) -> dict[str, Factory]:
    """Return ours, built like the peers, and the installed peers."""
    channels = [width * n for n in SMALL]
    networks: dict[str, Factory] = {
        f"unet3d, {strategy}": partial(
            build_ours,
            *(channels, strategy),
            norm="instance",
            activation="leaky_relu",
            upsampling="transposed",
        )
        for strategy in FUSED_STRATEGIES
    }
    return networks | dict(list_peers(channels))


def predict_peers() -> dict[str, Any]:
    """Estimate the peaks of all networks at 2 x 1 x 320 x 160 x 32, a size that all accept."""
    size, channels, rows = PEERS_SIZE, [64, 128, 256, 256], {}
    for name, make in list_comparable_networks().items():
        predicted = estimate(make, size, 2, "16", cuda=True)
        rows[name] = {"peak_allocated_mib": to_mib(predicted.peak.allocated)}
    return {"size": size, "batch": 2, "channels": channels, "precision": "16", "rows": rows}


def predict_fits() -> dict[str, Any]:
    """Estimate what two cubes of each size take of a GPU, CUDA context included, until 80 GiB."""
    rows: dict[str, dict[int, int]] = {}
    for model, strategy in product(("unet_small", "unet_nnunet", "unet_resenc"), FITTED):
        needed = rows[f"{model}, {strategy}"] = {}
        for side in range(64, 288, 32):
            words = [
                f"model={model}",
                f"checkpointing={strategy}",
                "precision=16",
                "data.in_channels=1",
                "data.batch_size=2",
            ]
            words += [
                f"data.patch_size=[{side},{side},{side}]",
                "data.num_classes=4",
                "optimizer=sgd",
            ]
            config = compose_config([*words, "trainer.accelerator=gpu"], "train")
            peak = estimate_configured_step(parse_train_config(config).step, validates=False).peak
            needed[side] = to_mib(add_context_bytes(peak))
            if needed[side] > 80 * 1024:
                break
    return {"batch": 2, "classes": 4, "precision": "16", "optimizer": "SGD", "rows": rows}


def predict_residual() -> dict[str, Any]:
    """Estimate the peaks of nnU-Net's residual encoder and ours, and count their FLOPs."""
    from scripts.bench.networks import list_residual_networks

    size, rows = [128, 128, 128], {}
    for name, make in list_residual_networks().items():

        def make_step(make: Factory = make) -> TracedStep:
            step = build_cuda_step(make, size, 2, "16")
            step.optimizer = SGD(step.model.parameters())
            enable_foreach(step.optimizer)
            return step

        peak = trace_step(make_step, cuda=True, validates=False).peak
        with simulate_cuda():  # in the tiles of a GPU
            flops = count_flops(make_step)
        rows[name] = {
            "peak_allocated_mib": to_mib(peak.allocated),
            "peak_reserved_mib": to_mib(peak.reserved),
            "convolution_flops": flops,
        }
    return {"size": size, "batch": 2, "classes": 4, "precision": "16", "rows": rows}


def set_tile_size(make: Factory, mib: int) -> Factory:
    """Return a factory of the same network with tiles of another size."""

    def make_with_tiles() -> nn.Module:
        model: Any = make()
        model.retention = replace(model.retention, tile_bytes=mib * MIB)
        return model

    return make_with_tiles


def main() -> None:
    options = make_parser("scripts.bench.step", __doc__, output="cpu-step.json").parse_args()
    warnings.simplefilter("ignore")
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):  # 32 MiB, an H100's default
        parts = {"forum": predict_forum(), "peers": predict_peers()}
        if find_spec("dynamic_network_architectures"):
            parts["residual encoder"] = predict_residual()
    parts["fits"] = predict_fits()  # with the 8 MiB of smaller GPUs
    write_results(options.output, {"predicted": parts}, update=True)


if __name__ == "__main__":
    main()
