"""A convolution slab by slab, and the way back within the buffer that its gradient comes in."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.model.lean.feature_maps import Convolution, LazyActivation, convolve
from unet3d.model.lean.norms import Gradient
from unet3d.model.lean.ops import norm_ops

aten = torch.ops.aten

Sink = Callable[[Tensor, int, int], None]
"""Takes rows [start, stop) of a source's gradient."""


def backward(
    convolution: Convolution,
    g: Tensor,
    sinks: Sequence[Sink | None],
    *,
    weight: bool,
    through: tuple[LazyActivation, Gradient] | None = None,
    below: LazyActivation | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of the weight; rows of the input's go to the sinks as they are ready.

    The input's gradient in rows [s, t) needs the output's in [s - halo, t + halo): so it follows
    one halo behind, and sinks may write it over `g`, of whose last rows a copy is held until then.

    With `through`, g is still that of the activation, whose raw rows were not kept: they are redone
    here and g is led back through the norm first. With `below`, the sums that the norm of the only
    source will need are made here, from raw rows that are there anyway; they are returned second.
    """
    space, halo = convolution.space, convolution.halo
    weights = convolution.weights()
    turned = None
    if any(sink is not None for sink in sinks):
        turned = weights[0].transpose(0, 1).flip(2, 3, 4)
        turned = turned.contiguous(memory_format=torch.channels_last_3d)
    to_weight = sums = behind = None
    done = 0
    for start, stop in convolution.slabs():
        x, padding, raw = convolution.input(start, stop)
        rows = space.narrow_rows(g, start, stop)
        if through is not None:
            y = convolve(x, *weights, padding)
            backward_norm_act(rows, y, *through, out=rows)
            del y
        if weight:
            more = _to_weight(rows, x, weights[0], padding)
            to_weight = more if to_weight is None else to_weight.add_(more)
        del x, rows
        if turned is None:
            continue
        end = stop if stop == space.rows else stop - halo
        around, padding = _around(convolution, g, done, end, behind)
        behind = space.narrow_rows(g, end - halo, end).clone() if end < space.rows else None
        made = convolve(around, turned, None, padding)
        del around
        if below is not None and raw is not None:
            first = max(start - halo, 0)
            y = space.narrow_rows(raw, done - first, end - first)
            more = compute_norm_gradient_sums(made, y, below)
            sums = more if sums is None else sums.add_(more)
            del y
        del raw
        channel = 0
        for source, sink in zip(convolution.sources, sinks, strict=True):
            if sink is not None:
                sink(made.narrow(1, channel, source.channels), done, end)
            channel += source.channels
        done = end
        del made
    return to_weight, sums


def compute_norm_gradient_sums(g: Tensor, y: Tensor, activated: LazyActivation) -> Tensor:
    """What the norm's gradient needs to know of these rows."""
    n = activated.norm
    return norm_ops.gradient_sums(g, y, n.scale, n.shift, n.mean, n.inverse, n.slope)


def backward_norm_act(
    g: Tensor, y: Tensor, activated: LazyActivation, step: Gradient, *, out: Tensor
) -> None:
    """Through activation and norm: `out` may be g or y."""
    n = activated.norm
    norm_ops.gradient(g, y, n.scale, n.shift, step.constant, step.linear, n.slope, out)


def _to_weight(g: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    g = g.contiguous(memory_format=torch.channels_last_3d)
    if g.device.type == "cpu" and g.dtype == torch.bfloat16 and g.shape[2] == 2:
        # oneDNN leaves parts of this gradient unset where a depth of 2 is padded (torch 2.13).
        g, x, weight = g.float(), x.float(), weight.float()
    _, found, _ = aten.convolution_backward(
        g, x, weight, None, [1] * 3, padding, [1] * 3, False, [0] * 3, 1, [False, True, False]
    )
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _around(
    convolution: Convolution, g: Tensor, start: int, stop: int, behind: Tensor | None
) -> tuple[Tensor, list[int]]:
    """Rows [start - halo, stop + halo) of g, zeros outside; those behind were written over."""
    space, halo = convolution.space, convolution.halo
    padding = [k // 2 for k in convolution.module.kernel_size]
    if start == 0 and stop == space.rows:
        return g, padding
    padding[space.axis - 2] = 0
    rows = stop - start
    around = space.empty(g.shape[1], rows + 2 * halo)
    before = space.narrow_rows(around, 0, halo)
    before.zero_() if behind is None else before.copy_(behind)
    last = min(stop + halo, space.rows)
    space.narrow_rows(around, halo, halo + last - start).copy_(space.narrow_rows(g, start, last))
    if last < stop + halo:
        space.narrow_rows(around, halo + last - start, rows + 2 * halo).zero_()
    return around, padding
