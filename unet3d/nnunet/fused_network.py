"""Run nnU-Net's networks as fused blocks; their modules and the names of their weights stay.

The attributes of their modules were read in dynamic-network-architectures 0.4.4.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from unet3d.config.instantiate import read_option
from unet3d.errors import UsageError
from unet3d.model.blocks import ConvNormAct, ResidualBlock, ResidualLevel, Strided
from unet3d.model.unet import UNet3D
from unet3d.module_hooks import find_hook
from unet3d.pool.avg import AvgPool3d

NORMS = {nn.InstanceNorm3d: "instance", nn.BatchNorm3d: "batch", nn.SyncBatchNorm: "batch"}


def use_fused_blocks(network: Any, checkpointing: str = "lean") -> None:
    """Make a PlainConvUNet or ResidualEncoderUNet compute its forward with fused blocks.

    `checkpointing` is a strategy of conf/checkpointing/.
    """
    kind = type(network)
    _build_engine(network)  # refuses what is not supported
    network.__class__ = type(f"Fused{kind.__name__}", (_FusedForward, kind), {})
    network.checkpointing, network.__dict__["engine"] = checkpointing, None


class _FusedForward(nn.Module):
    """Replaces the forward of nnU-Net's networks."""

    engine: Any  # not a submodule: it shares the network's modules
    checkpointing: str

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """(B, C, D, H, W) -> (B, K, D, H, W), or a list of these, as nnU-Net's network."""
        network: Any = self
        if any(find_hook(part) for part in self.children()):  # fused blocks would not run it
            return super().forward(x)
        known = [self.checkpointing, *self.modules()]  # which may be replaced, as for SyncBatchNorm
        if self.engine is None or self.engine.built_from != known:
            engine = _build_engine(network)
            read_option("checkpointing", self.checkpointing)().apply(engine)
            engine.own = [m for m in engine.modules() if m not in known]
            engine.built_from = known
            self.__dict__["engine"] = engine
        engine = self.engine
        for module in engine.own:  # the others have modes of their own, such as frozen norms
            module.training = self.training
        engine.returns_list = network.decoder.deep_supervision
        return engine(x)


class _FusedUNet(UNet3D):
    """A UNet3D whose decoders read the upsampled map first, with a head at every level."""

    returns_list = False
    own: list[nn.Module]  # modules that are not nnU-Net's
    built_from: list[Any]

    def _supervises(self) -> bool:
        return self.returns_list


def _build_engine(network: Any) -> _FusedUNet:
    """Build a UNet3D of the network's own modules."""
    encoder, decoder = network.encoder, network.decoder
    residual = hasattr(encoder, "stem")
    stages = [stage.blocks if residual else stage[0].convs for stage in encoder.stages]
    first = encoder.stem.convs[0] if residual else stages[0][0]
    norm = NORMS.get(type(first.norm)) if hasattr(first, "norm") else None
    if not isinstance(first.conv, nn.Conv3d) or norm is None:
        raise UsageError("fused blocks need a 3D network of nnU-Net with instance or batch norm")
    decoder_convs = [len(stage.convs) for stage in reversed(decoder.stages)]
    convs = [*decoder_convs, 1 if residual else len(stages[-1])]
    if not residual and convs != [len(stage) for stage in stages]:
        raise UsageError("fused blocks need as many convolutions in the decoder as in the encoder")
    if residual and set(encoder.stages[0].blocks[0].conv1.conv.stride) != {1}:
        raise UsageError("fused blocks need a first stage of residual blocks with a stride of 1")
    first_layers = [stage[0].conv1 if residual else stage[0] for stage in stages]
    drop_path = getattr(stages[0][0], "drop_path", None)
    with torch.device("meta"):
        engine = _FusedUNet(
            in_channels=first.conv.in_channels,
            num_classes=network.decoder.num_classes,
            channels=list(encoder.output_channels),
            convs_per_level=convs,
            residual_blocks=[len(stage) for stage in stages] if residual else None,
            stochastic_depth=0.0 if drop_path is None else drop_path.drop_prob,
            kernel_size=[layer.conv.kernel_size for layer in first_layers],
            pool_kernel=[tuple(stride) for stride in encoder.strides[1:]],
            norm=norm,
            upsampling="transposed",
            pool=partial(Strided, skip_pool=AvgPool3d),
        )
    encoders, decoders = cast(Any, engine.encoder), cast(Any, engine.decoder)
    for level, stage in zip(encoders, stages, strict=True):
        ours: list[Any] = list(level.convs)
        if isinstance(level.convs, ResidualLevel) and not isinstance(ours[0], ResidualBlock):
            _share(ours.pop(0), encoder.stem.convs[0])
        for module, theirs in zip(ours, stage, strict=True):
            (_share_residual if residual else _share)(module, theirs)
    for level, stage, up in zip(decoders, decoder.stages, decoder.transpconvs, strict=True):
        level.up, level.skip_first = up, False
        for module, theirs in zip(level.convs, stage.convs, strict=True):
            _share(module, theirs)
    engine.heads = nn.ModuleList(reversed(decoder.seg_layers))
    return engine


def _share(ours: ConvNormAct, theirs: Any) -> None:
    """Replace the parts of a layer by those of nnU-Net's."""
    expected = [theirs.conv, theirs.norm, *([theirs.nonlin] if hasattr(theirs, "nonlin") else [])]
    if list(map(type, theirs.all_modules)) != list(map(type, expected)):
        raise UsageError(f"fused blocks support convolution, norm and activation, got {theirs}")
    if ours.conv.weight.shape != theirs.conv.weight.shape:
        raise UsageError(
            "fused blocks need the channels of nnU-Net's plans, without stem_channels or "
            f"bottleneck_channels, got {theirs}"
        )
    ours.conv, ours.norm = theirs.conv, theirs.norm
    ours.act = getattr(theirs, "nonlin", None) or nn.Identity()


def _share_residual(ours: ResidualBlock, theirs: Any) -> None:
    """Replace the parts of a residual block by those of nnU-Net's."""
    if not hasattr(theirs, "conv2") or hasattr(theirs, "conv3") or theirs.apply_se:
        raise UsageError(
            "fused blocks support residual blocks of two convolutions without squeeze-excitation, "
            f"got {theirs}"
        )
    _share(ours.conv1, theirs.conv1)
    _share(ours.conv2, theirs.conv2)
    ours.act = theirs.nonlin2
    if ours.projection is not None:
        _share(ours.projection, theirs.skip[-1])
