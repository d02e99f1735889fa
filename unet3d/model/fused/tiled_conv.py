"""Compute a convolution's backward tile by tile, within the buffer of its output's gradient."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.model.fused import onednn
from unet3d.model.fused.convolution import Convolution, convolve
from unet3d.model.fused.feature_maps import LazyActivation
from unet3d.model.fused.norms import NormGradient
from unet3d.model.fused.ops import norm_ops

aten = torch.ops.aten

Sink = Callable[[Tensor, int, int], Tensor]
"""Receives rows [start, stop) of a source's gradient; returns these rows of the whole gradient."""


def backward(
    convolution: Convolution,
    g: Tensor,
    sinks: Sequence[Sink | None],
    *,
    needs_weight: bool,
    activation: tuple[LazyActivation, NormGradient] | None = None,
    previous: LazyActivation | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight's gradient, and send rows of the input's gradient to the sinks.

    The input's gradient in rows [s, t) needs the output's in [s - halo, t + halo), so it follows
    one halo behind. Sinks may overwrite `g`: a copy of its last rows is held until then.

    With `activation`, `g` is the gradient of the activation, whose raw rows were not stored: they
    are recomputed here, and `g` first goes through activation and norm. With `previous`, the only
    source, the sums that the backward of its norm needs are computed here, from raw rows that are
    in memory anyway, and returned second.
    """
    layout, halo = convolution.layout, convolution.halo
    weight, transposed = convolution.weight(), None
    if any(sink is not None for sink in sinks):
        transposed = weight.transpose(0, 1).flip(2, 3, 4)
        transposed = transposed.contiguous(memory_format=torch.channels_last_3d)
    weight_gradient = sums = halo_before = None
    done = 0
    for start, stop in convolution.tiles():
        x, padding, raw = convolution.input(start, stop)
        rows = layout.narrow_rows(g, start, stop)
        if activation is not None:
            y = convolve(x, weight, padding)
            backward_norm_act(rows, y, *activation, out=rows)
            del y
        if needs_weight:
            part = compute_weight_gradient(rows, x, weight, padding)
            weight_gradient = part if weight_gradient is None else weight_gradient.add_(part)
        del x, rows
        if transposed is None:
            continue
        end = stop if stop == layout.rows else stop - halo
        padded, padding = _with_halo(convolution, g, done, end, halo_before)
        halo_before = layout.narrow_rows(g, end - halo, end).clone() if end < layout.rows else None
        to_input = convolve(padded, transposed, padding)
        del padded
        channel = 0
        for source, sink in zip(convolution.sources, sinks, strict=True):
            if sink is not None:
                whole = sink(to_input.narrow(1, channel, source.channels), done, end)
                if previous is not None and raw is not None:
                    first = max(start - halo, 0)
                    y = layout.narrow_rows(raw, done - first, end - first)
                    sums = add_norm_gradient_sums(whole, y, previous, sums)
                    del y
                del whole
            channel += source.channels
        del raw
        done = end
        del to_input
    return weight_gradient, sums


def backward_strided(
    convolution: Convolution, g: Tensor, sink: Sink | None, *, needs_weight: bool
) -> Tensor | None:
    """Return the weight's gradient, and send rows of the input's gradient to the sink.

    Tiles overlap: the sink has to add them up.
    """
    weight, stride = convolution.weight(), convolution.stride
    axis, total = convolution.layout.axis, None
    for start, stop in convolution.tiles():
        x, padding = convolution.input(start, stop)[:2]
        rows = convolution.layout.narrow_rows(g, start, stop)
        if needs_weight:
            part = compute_weight_gradient(rows, x, weight, padding, stride)
            total = part if total is None else total.add_(part)
        part, shape = None, x.shape
        if convolution.add_gradient is not None:
            part = convolution.add_gradient(convolution.take_windows(x, start, stop), start, stop)
        del x
        if sink is None:
            continue
        to_input = _compute_input_gradient(rows, shape, weight, padding, stride)
        if part is not None:
            convolution.take_windows(to_input, start, stop).add_(part)
            del part
        begin, end = convolution.source_rows(start, stop)
        first, last = max(begin, 0), min(end, convolution.step * convolution.layout.rows)
        sink(to_input.narrow(axis, first - begin, last - first), first, last)
        del to_input
    return total


def add_norm_gradient_sums(
    g: Tensor, y: Tensor, activation: LazyActivation, sums: Tensor | None
) -> Tensor:
    """Add the sums over these rows that the norm's backward needs, (2, B, C), to `sums`, if any."""
    n, first = activation.norm, sums is None
    if sums is None:
        sums = norm_ops.make_sums(y)
    norm_ops.add_gradient_sums(g, y, n.scale, n.shift, n.mean, n.inverse, n.slope, first, sums)
    return sums


def backward_norm_act(
    g: Tensor, y: Tensor, activation: LazyActivation, gradient: NormGradient, *, out: Tensor
) -> None:
    """Write the gradient of raw rows `y` to `out`, which may be `g` or `y`."""
    n = activation.norm
    norm_ops.gradient(
        g, y, gradient.scale, n.shift, gradient.constant, gradient.linear, n.slope, out
    )


def _compute_input_gradient(
    g: Tensor, shape: torch.Size, weight: Tensor, padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    g = g.contiguous(memory_format=torch.channels_last_3d)
    x = g.new_empty(1).expand(shape)  # only its shape counts, as in torch.nn.grad.conv3d_input
    gradient, _, _ = aten.convolution_backward(
        g, x, weight, None, stride, padding, [1] * 3, False, [0] * 3, 1, [True, False, False]
    )
    return gradient


def compute_weight_gradient(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int] = (1, 1, 1),
) -> Tensor:
    """Return the gradient of a convolution's weight, at least in float32."""
    g = g.contiguous(memory_format=torch.channels_last_3d)
    if g.device.type == "cpu" and g.dtype == torch.bfloat16 and g.shape[2] == 2:
        # oneDNN leaves parts of this gradient uninitialized for a padded depth of 2 (torch 2.13).
        g, x, weight = g.float(), x.float(), weight.float()
    x = onednn.prepare_input(x)
    _, gradient, _ = aten.convolution_backward(
        g, x, weight, None, stride, padding, [1] * 3, False, [0] * 3, 1, [False, True, False]
    )
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _with_halo(
    convolution: Convolution, g: Tensor, start: int, stop: int, halo_before: Tensor | None
) -> tuple[Tensor, list[int]]:
    """Return rows [start - halo, stop + halo) of `g`, zero outside, and the padding left to add.

    `halo_before` is the copy of the rows before `start`, which have been overwritten.
    """
    layout, halo = convolution.layout, convolution.halo
    padding = [k // 2 for k in convolution.module.kernel_size]
    if start == 0 and stop == layout.rows:
        return g, padding
    padding[layout.axis - 2] = 0
    rows = stop - start
    padded = layout.empty(g.shape[1], rows + 2 * halo)
    before = layout.narrow_rows(padded, 0, halo)
    before.zero_() if halo_before is None else before.copy_(halo_before)
    last = min(stop + halo, layout.rows)
    layout.narrow_rows(padded, halo, halo + last - start).copy_(layout.narrow_rows(g, start, last))
    if last < stop + halo:
        layout.narrow_rows(padded, halo + last - start, rows + 2 * halo).zero_()
    return padded, padding
