"""Define a configurable 3D U-Net, from Cicek et al. (2016) to nnU-Net."""

import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from math import prod
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn

from unet3d.custom_ops import keep_metadata
from unet3d.errors import UsageError
from unet3d.model.blocks import (
    ACTIVATIONS,
    ConvBlock,
    ConvNormAct,
    ResidualLevel,
    Strided,
    build_upsampling,
    lookup,
    pad_to,
)
from unet3d.model.fused.decoder import FusedDecoderLevel
from unet3d.model.fused.encoder import ConvEncoderLevel, ResidualEncoderLevel, make_input_map
from unet3d.model.fused.support import find_unsupported
from unet3d.model.sizes import (
    PerLevel,
    expand_per_level,
    get_residual_blocks,
    resolve_decoder_channels,
    resolve_encoder_channels,
)
from unet3d.module_hooks import find_hook
from unet3d.pool.avg import AvgPool3d
from unet3d.pool.replace import get_pooling
from unet3d.types import LevelPolicy, PoolFactory, Retention, Triple


class UNet3D(nn.Module):
    """A U-Net of `depth` levels; level 0 is full resolution.

    It takes volumes (B, C, D, H, W) of any size, and returns logits (B, K, D, H, W); with
    `deep_supervision`, in training, a list of logits of the finest and coarser levels::

        >>> network = UNet3D(in_channels=1, num_classes=4, depth=3, width=8, norm="instance")
        >>> network(torch.randn(2, 1, 30, 32, 20)).shape
        torch.Size([2, 4, 30, 32, 20])

    These options matter most for memory: `width`, the channels of level 0; `fused`, with which
    blocks store only what backward cannot cheaply recompute; and `pool`. Loss and gradients of
    fused blocks are those of plain modules. Networks that they cannot compute, for example with
    forward hooks or replaced modules, run as plain modules and warn once.

    `channels` sets the channels of each level; without it level i has width * 2**i, at most
    `max_width`. `decoder_channels` is "same" (as the encoder at that level), "finer" (as the
    encoder one level finer) or a list from level 0 down. With `halve_first_conv`, all but the last
    convolution of an encoder level have half of its channels. `kernel_size` and `pool_kernel`
    (pooling from level i to i + 1) are one size for all levels or one per level. `norm` is "batch",
    "instance", "group" or "none", `activation` "relu" or "leaky_relu", `upsampling` "trilinear",
    "nearest", "transposed" or "transposed_wide".

    With `residual_blocks` (an int, or one per level, the last of which repeats), encoder levels are
    residual blocks and the finest one begins with a convolution, as in nnU-Net's residual encoder;
    `convs_per_level` is then that of the decoder.

    `pool` is "max", "avg", "median", "approx_median", "strided" (convolutions with a stride) or a
    function that makes a layer from a kernel size.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        channels: Sequence[int] | None = None,
        depth: int = 4,
        width: int = 32,
        max_width: int = 320,
        decoder_channels: str | Sequence[int] = "same",
        convs_per_level: int | Sequence[int] = 2,
        halve_first_conv: bool = False,
        residual_blocks: int | Sequence[int] | None = None,
        stochastic_depth: float = 0.0,
        kernel_size: PerLevel = 3,
        pool_kernel: PerLevel = 2,
        norm: str = "batch",
        activation: str = "relu",
        negative_slope: float = 0.01,
        upsampling: str = "trilinear",
        deep_supervision: bool = False,
        pool: str | PoolFactory = "max",
        fused: bool = True,
    ):
        super().__init__()
        sizes = {"in_channels": in_channels, "num_classes": num_classes, "depth": depth}
        for name, size in (sizes | {"width": width, "max_width": max_width}).items():
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise UsageError(f"{name} must be an int >= 1, got {size!r}")
        if not 0 <= stochastic_depth < 1 or (stochastic_depth and residual_blocks is None):
            raise UsageError(
                "stochastic_depth must be in [0, 1), and above 0 needs residual_blocks, got "
                f"{stochastic_depth} with residual_blocks={residual_blocks}"
            )
        if negative_slope < 0:
            raise UsageError(f"negative_slope must be at least 0, got {negative_slope}")
        enc = resolve_encoder_channels(channels, depth, width, max_width)
        depth = len(enc)
        if deep_supervision and depth < 4:
            raise UsageError(
                f"deep_supervision has a single output with {depth} levels, as the coarsest "
                "decoder level has none: use depth >= 4, or leave it off"
            )
        dec = resolve_decoder_channels(decoder_channels, enc)
        convs = (
            [convs_per_level] * depth if isinstance(convs_per_level, int) else list(convs_per_level)
        )
        if len(convs) != depth or min(convs) < 1:
            raise UsageError(
                f"convs_per_level must be an int >= 1, or one per level, got {convs_per_level}"
            )
        kernels = expand_per_level(kernel_size, depth, "kernel_size")
        self.pool_kernels = expand_per_level(pool_kernel, depth - 1, "pool_kernel")
        self.retention: Retention | None = Retention() if fused else None
        self._warned_of: str | None = None
        self.norm = norm
        pool = partial(Strided, skip_pool=AvgPool3d) if pool == "strided" else get_pooling(pool)

        make_activation = partial(lookup(ACTIVATIONS, activation, "activation"), negative_slope)
        layers = [
            partial(ConvNormAct, kernel_size=kernel, norm=norm, activation=make_activation)
            for kernel in kernels
        ]
        self.encoder = nn.ModuleList()
        previous, strided = in_channels, None
        for level, (out, layer) in enumerate(zip(enc, layers, strict=True)):
            if residual_blocks is None:
                middle = max(1, out // 2) if halve_first_conv else out
                widths = [previous, *[middle] * (convs[level] - 1), out]
                stride = (1, 1, 1) if strided is None else strided.kernel_size
                block = ConvBlock(widths, stride=stride, make_layer=layer)
            else:
                block = ResidualLevel(
                    *(previous, out, get_residual_blocks(residual_blocks, level)),
                    stem=level == 0,
                    strided=strided,
                    stochastic_depth=stochastic_depth,
                    make_layer=layer,
                    activation=make_activation,
                )
            size = self.pool_kernels[level] if level + 1 < depth else None
            pooling = None if size is None else pool(size)
            self.encoder.append(EncoderLevel(block, pooling, size))
            previous, strided = out, pooling if isinstance(pooling, Strided) else None

        self.decoder = nn.ModuleList()  # from the coarsest level to level 0
        for level in reversed(range(depth - 1)):
            up, up_channels = build_upsampling(
                upsampling, self.pool_kernels[level], previous, enc[level]
            )
            widths = [enc[level] + up_channels, *[dec[level]] * convs[level]]
            self.decoder.append(DecoderLevel(up, ConvBlock(widths, make_layer=layers[level])))
            previous = dec[level]

        supervised = range(depth - 2 if deep_supervision else 1)
        self.heads = nn.ModuleList(nn.Conv3d(dec[level], num_classes, 1) for level in supervised)

    has_lazy_logits = True

    def forward(self, x: Tensor, lazy_logits: bool = False) -> Any:
        """(B, C, D, H, W) -> (B, K, D, H, W); a list, finest first, in deep supervision.

        With `lazy_logits`, those of fused blocks with many classes are LazyLogits.
        """
        self._check_input(x)
        is_plain = torch.compiler.is_compiling() or not x.numel() or x.device.type == "meta"
        if self.retention is None or is_plain or self._is_changed():
            outputs = self._forward_plain(x)
        elif hasattr(x, "copy_meta_from"):  # MONAI's MetaTensor
            outputs = keep_metadata(partial(self._forward_fused, retention=self.retention), x)
        else:
            outputs = self._forward_fused(x, self.retention, lazy_logits)
        return outputs if self._supervises() else outputs[0]

    def _forward_plain(self, x: Tensor) -> list[Tensor]:
        skips, outputs = [], []
        for level in self.encoder:
            skips.append(level(x))
            pool: Any = level.pool
            x = skips[-1] if pool is None else pool(skips[-1])
        skips.pop()
        while skips:
            level = len(skips) - 1
            x = self.decoder[-1 - level](x, skips.pop())
            if self._has_output(level):
                outputs.insert(0, self.heads[level](x))
        return outputs

    def _forward_fused(
        self, image: Tensor, retention: Retention, lazy_logits: bool = False
    ) -> list[Any]:
        skips, outputs = [], []
        encoder, heads = cast(Any, self.encoder), cast(Any, self.heads)
        x = make_input_map(image, heads[0].weight.dtype, retention.tile_bytes)
        for level, module in enumerate(encoder):
            part = "residual" if module.is_residual else "encoder"
            x, skip = module(x, retention.get_level(part, level))
            skips.append(skip)
        skips.pop()
        while skips:
            level = len(skips) - 1
            head = self.heads[level] if self._has_output(level) else None
            # Without gradients, coarser levels are freed before a loss could read them.
            lazy = lazy_logits and (level == 0 or torch.is_grad_enabled())
            policy = retention.get_level("decoder", level)
            x, logits = self.decoder[-1 - level](x, skips.pop(), policy, head, level, lazy)
            if logits is not None:
                outputs.insert(0, logits)
        return outputs

    def _is_changed(self) -> bool:
        """Return whether fused blocks would ignore a change of the network; warn the first time."""
        reason = find_unsupported(self)
        if reason is not None and reason != self._warned_of:
            self._warned_of = reason
            warnings.warn(
                f"{reason}: the network runs as plain modules, which store more for backward; "
                "fused=False (checkpointing=none) does so without this warning",
                stacklevel=5,
            )
        return reason is not None

    def _supervises(self) -> bool:
        """Return whether all heads are computed."""
        return self.training and len(self.heads) > 1

    def _has_output(self, level: int) -> bool:
        return level == 0 or (level < len(self.heads) and self._supervises())

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (level, module) for every encoder and decoder level, in forward order."""
        yield from enumerate(self.encoder)
        for n, module in enumerate(self.decoder):
            yield len(self.decoder) - 1 - n, module

    def split_head(self) -> tuple[nn.Module, nn.Conv3d | None]:
        """Return the network with its last features as output, and the head of these.

        Both share the weights of this network. The head is None where it is not a plain one.
        """
        head = self.heads[0]
        if type(self).forward is not UNet3D.forward or self._forward_hooks:
            return self, None
        if type(head) is not nn.Conv3d or head.kernel_size != (1, 1, 1) or find_hook(head):
            return self, None
        channels, weight = head.in_channels, head.weight
        identity = nn.Conv3d(
            channels, channels, 1, bias=False, device=weight.device, dtype=weight.dtype
        ).requires_grad_(False)
        nn.init.dirac_(identity.weight)
        body = copy(self)
        vars(body).pop("forward", None)  # of a strategy, which would run this network
        body._modules = self._modules | {"heads": nn.ModuleList([identity])}
        return body, head

    def list_heads(self) -> list[nn.Module]:
        """Return the heads, finest first."""
        return list(self.heads)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 5:
            raise UsageError(
                "UNet3D takes batches of volumes (B, C, D, H, W), got a tensor of shape "
                f"{tuple(x.shape)}" + (": add the batch with x[None]" if x.dim() == 4 else "")
            )
        if not x.is_floating_point():
            raise UsageError(f"UNet3D takes floating-point numbers, got {x.dtype}: use x.float()")
        encoder: Any = self.encoder
        first = getattr(encoder[0].convs[0], "conv", None)  # may have been replaced
        if x.shape[1] != (channels := getattr(first, "in_channels", x.shape[1])):
            raise UsageError(
                f"the network takes {channels} channels, got {x.shape[1]} in a batch of shape "
                f"{tuple(x.shape)}"
            )
        size = list(x.shape[2:])
        for kernel in self.pool_kernels:
            size = [n // k for n, k in zip(size, kernel, strict=True)]
        volumes = {"batch": len(x) if self.training else 2, "instance": 1}.get(self.norm, 2)
        if min(size) < 1 or volumes * prod(size) == 1:  # a single value has no variance
            few = "too few" if min(size) < 1 else f"too few for the {self.norm} norm"
            raise UsageError(
                f"a patch of {list(x.shape[2:])} has {size} voxels at the last of "
                f"{len(self.pool_kernels) + 1} levels, {few}: use larger patches "
                "(data.patch_size) or fewer levels (model.depth)"
            )


class EncoderLevel(nn.Module):
    """Convolve. A fused block also pools for the next level; the coarsest level has no pooling."""

    def __init__(
        self,
        convs: ConvBlock | ResidualLevel,
        pool: nn.Module | None,
        pool_kernel: Triple | None,
    ):
        super().__init__()
        self.convs = convs
        self.is_residual = isinstance(convs, ResidualLevel)
        self.pool = pool
        self.pool_kernel = pool_kernel or (1, 1, 1)

    def forward(self, x: Any, policy: LevelPolicy | None = None) -> Any:
        """Tensor -> tensor; in a fused block, with its `policy`: map -> (pooled map, skip)."""
        if policy is None:
            return self.convs(x)
        kind = ResidualEncoderLevel if self.is_residual else ConvEncoderLevel
        return kind(x, list(self.convs), self.pool, self.pool_kernel, policy).run_on(x)


class DecoderLevel(nn.Module):
    """Upsample, concatenate the skip, convolve. A fused block also runs its head."""

    def __init__(self, up: nn.Module, convs: ConvBlock):
        super().__init__()
        self.up = up
        self.convs = convs
        self.skip_first = True  # the order in which skip and upsampled map are concatenated

    def forward(
        self,
        x: Any,
        skip: Any,
        policy: LevelPolicy | None = None,
        head: nn.Conv3d | None = None,
        level: int = 0,
        lazy: bool = False,
    ) -> Any:
        """Tensors -> tensor; in a fused block, with its `policy`: maps -> (map, logits)."""
        if policy is not None:
            options: Any = {"last": level == 0, "policy": policy, "skip_first": self.skip_first}
            block = FusedDecoderLevel(
                x, skip, self.up, list(self.convs), head, lazy=lazy, **options
            )
            return block.run_on(x, skip)
        x = pad_to(self.up(x), skip)
        x = torch.cat([skip, x] if self.skip_first else [x, skip], dim=1)
        del skip
        return self.convs(x)
