"""Estimate the memory of a training step by the number of classes, and time it on this CPU.

    pip install '.[peers]'
    python -m scripts.bench.classes

nnU-Net's and MONAI's networks run with the loss of their projects, all with the same channels, at
2 x 1 x 128 x 128 x 128 in mixed fp16 with SGD. `linear_cross_entropy` is PyTorch's head with
cross-entropy, whose logits never exist as a whole, behind nnU-Net's network; it has no Dice. Ours
and nnU-Net's have deep supervision. The time is that of a step with lazy logits relative to one
with whole logits, in processor seconds of one thread.
"""

import os
import statistics
import time
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench.networks import RESIDUAL_CHANNELS, build_theirs, list_ours
from scripts.bench.results import make_parser, run_in_new_process, write_results
from scripts.bench.step import FITTED, SGD, Factory, build_cuda_step, to_mib
from unet3d.loss.deep_supervision import resize_labels
from unet3d.loss.overlap import DiceCE
from unet3d.memory.estimate import trace_step
from unet3d.memory.fake_tensors import enable_foreach
from unet3d.memory.traced_step import TracedStep
from unet3d.types import get_label_dtype

SIZE, CLASSES, TIMED = [128, 128, 128], (2, 16, 50, 118, 250, 1000), (40, 118)


class NnUNetLoss(nn.Module):
    """Dice and cross-entropy of nnU-Net, with its weights of deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
        from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

        dice = {"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}
        self.loss = DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss)

    def forward(self, outputs: list[Tensor], labels: Tensor) -> Tensor:
        losses = []
        for n, output in enumerate(outputs[:-1]):  # the coarsest one has no weight
            target = resize_labels(labels, output.shape[2:])[:, None]
            losses.append(self.loss(output, target) / 2**n)
        return torch.stack(losses).sum()


class LinearCrossEntropy(nn.Module):
    """PyTorch's head and cross-entropy in one, given the features that a head would read."""

    def __init__(self, head: nn.Conv3d):
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        voxels = features.movedim(1, -1).flatten(0, -2)
        weight = self.head.weight.flatten(1).to(voxels.dtype)
        bias = None if self.head.bias is None else self.head.bias.to(voxels.dtype)
        options = nn.LinearCrossEntropyOptions()
        target = labels.flatten().long()
        return F.linear_cross_entropy(voxels, weight, target, linear_bias=bias, options=options)


def build_nnunet(classes: int, *, deep: bool) -> Any:
    """Build nnU-Net's plain network."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return build_theirs(PlainConvUNet, RESIDUAL_CHANNELS, 2, 2, classes, deep_supervision=deep)


def list_steps(classes: int) -> dict[str, tuple[Factory, Any]]:
    """Return networks and what makes their loss, given the network."""
    from monai.losses import DiceCELoss
    from monai.networks.nets.dynunet import DynUNet

    c = RESIDUAL_CHANNELS
    kernels, strides = [3] * len(c), [1] + [2] * (len(c) - 1)
    dynunet = partial(DynUNet, 3, 1, classes, kernels, strides, strides[1:], filters=c)
    monai_loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)

    ours = list_ours(c, num_classes=classes, deep_supervision=True)

    def take_head(network: Any) -> nn.Module:
        heads = network.decoder.seg_layers
        loss, heads[-1] = LinearCrossEntropy(heads[-1]), nn.Identity()
        return loss

    return {
        "nnU-Net": (partial(build_nnunet, classes, deep=True), lambda _: NnUNetLoss()),
        "MONAI DynUNet": (dynunet, lambda _: CallWithChannel(monai_loss)),
        "linear_cross_entropy": (partial(build_nnunet, classes, deep=False), take_head),
        **{name: (ours[name], lambda _: DiceCE()) for name in FITTED[1:]},
    }


class CallWithChannel(nn.Module):
    """A loss of MONAI, given labels (B, D, H, W)."""

    def __init__(self, loss: nn.Module):
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss(logits.float(), labels[:, None])


def estimate_peak(make: Factory, make_loss: Any, classes: int) -> int:
    """Return the estimated peak of a step in MiB."""

    def make_step() -> TracedStep:
        step = build_cuda_step(make, SIZE, 2, "16")
        step.loss = make_loss(step.model)
        step.label_dtype = getattr(torch, get_label_dtype(classes))
        step.optimizer = SGD([*step.model.parameters(), *step.loss.parameters()])
        enable_foreach(step.optimizer)
        return step

    return to_mib(trace_step(make_step, cuda=True, validates=False).peak.allocated)


def time_lazy(classes: int, width: int, rounds: int = 5) -> float:
    """Return the time of a step with lazy logits, relative to one with whole logits."""
    torch.set_num_threads(1)
    channels = [width * n for n in (1, 2, 4, 8)]
    model = list_ours(channels, num_classes=classes, deep_supervision=True)["fused"]()
    image, loss = torch.randn(2, 1, 64, 64, 32), DiceCE()
    labels = torch.randint(0, classes, (2, 64, 64, 32)).to(torch.uint8)

    def run(lazy: bool) -> float:
        start = time.process_time()
        loss(model(image, lazy_logits=lazy), labels).backward()
        model.zero_grad()
        return time.process_time() - start

    run(True), run(False)
    return statistics.median(run(True) / run(False) for _ in range(rounds))


def main() -> None:
    options = make_parser("scripts.bench.classes", __doc__, output="cpu-classes.json").parse_args()
    warnings.simplefilter("ignore")
    peaks: dict[str, dict[int, int]] = {}
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):  # 32 MiB, an H100's default
        for classes in CLASSES:
            for name, step in list_steps(classes).items():
                peaks.setdefault(name, {})[classes] = estimate_peak(*step, classes)
                print(classes, name, peaks[name][classes], flush=True)
    times = {
        f"{classes} classes, {width} channels": round(
            run_in_new_process(time_lazy, classes, width), 3
        )
        for classes in TIMED
        for width in (16, 32)
    }
    results = {"size": SIZE, "batch": 2, "precision": "16", "peak_mib": peaks, "time_ratio": times}
    write_results(options.output, results)


if __name__ == "__main__":
    main()
