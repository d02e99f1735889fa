"""Define the CUDA kernels of fused blocks, for channels-last maps or some rows or channels of one.

A program works on a tile of voxels x channels. Voxels are numbered within a volume, and the offset
of each is computed once, in int64; the stride of channels is 1. A program sums its own voxels in
float32, and the sums are added afterwards: without atomics, results are deterministic.
"""

import triton
import triton.language as tl

UNSPECIALIZED = """V H W B TILES P N count voxels per_part first count size low_first low_size taps
fd nd ld0 md fh nh lh0 mh fw nw lw0 mw""".split()
"""Arguments that kernels are not specialized for: levels and tiles have many values of them.

Strides are specialized: where they are multiples of 16, channels are read in wide loads.
"""


@triton.jit
def _tile(V, C, BV: tl.constexpr, BC: tl.constexpr):
    """Return a program's volume, voxels and channels, and the mask of those that there are."""
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    return tl.program_id(1), v, c, (v < V)[:, None] & (c < C)[None, :]


@triton.jit
def _pointers(x, v, b, c, H, W, sb, sd, sh, sw):
    """Return pointers to channels c of voxels v of volume b, given the strides of B, D, H, W."""
    w, line = v % W, v // W
    h, d = line % H, line // H
    inside = d.to(tl.int64) * sd + h.to(tl.int64) * sh + w.to(tl.int64) * sw
    return x + (tl.cast(b, tl.int64) * sb + inside)[:, None] + c[None, :]


@triton.jit
def _load_row(x, b, c, C):
    """Return the channels c of row b of x (B, C)."""
    return tl.load(x + b * C + c, mask=c < C, other=0.0)[None, :]


@triton.jit
def _normalize(
    add, y, scale, shift, slope, V, C, H, W, sb, sd, sh, sw, BV: tl.constexpr, BC: tl.constexpr
):
    """Return act(scale * y + shift + add) of a program's tile."""
    b, v, c, mask = _tile(V, C, BV, BC)
    x = tl.load(_pointers(y, v, b, c, H, W, sb, sd, sh, sw), mask=mask, other=0.0)
    n = _load_row(scale, b, c, C) * x.to(tl.float32) + _load_row(shift, b, c, C) + add
    return n * tl.where(n < 0, slope, 1.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def normalize_kernel(
    y0, y1, y2, y3, y4, y5, scale0, scale1, scale2, scale3, scale4, scale5,
    shift0, shift1, shift2, shift3, shift4, shift5,
    slope0, slope1, slope2, slope3, slope4, slope5, out, V, C, H, W,
    b0, d0, h0, w0, b1, d1, h1, w1, b2, d2, h2, w2, b3, d3, h3, w3, b4, d4, h4, w4,
    b5, d5, h5, w5, ob, od, oh, ow,
    COUNT: tl.constexpr, ADD: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write act(scale * y + shift + the same of the map before), for COUNT maps.

    To the first one, ADD adds `out`.
    """
    b, v, c, mask = _tile(V, C, BV, BC)
    target = _pointers(out, v, b, c, H, W, ob, od, oh, ow)
    n = tl.zeros([BV, BC], tl.float32)
    if ADD:
        n += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    n = _normalize(n, y0, scale0, shift0, slope0, V, C, H, W, b0, d0, h0, w0, BV, BC)
    if COUNT > 1:
        n = _normalize(n, y1, scale1, shift1, slope1, V, C, H, W, b1, d1, h1, w1, BV, BC)
    if COUNT > 2:
        n = _normalize(n, y2, scale2, shift2, slope2, V, C, H, W, b2, d2, h2, w2, BV, BC)
    if COUNT > 3:
        n = _normalize(n, y3, scale3, shift3, slope3, V, C, H, W, b3, d3, h3, w3, BV, BC)
    if COUNT > 4:
        n = _normalize(n, y4, scale4, shift4, slope4, V, C, H, W, b4, d4, h4, w4, BV, BC)
    if COUNT > 5:
        n = _normalize(n, y5, scale5, shift5, slope5, V, C, H, W, b5, d5, h5, w5, BV, BC)
    tl.store(target, n.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    g, y, out, scale, shift, constant, linear, slope,
    V, C, H, W, gb, gd, gh, gw, yb, yd, yh, yw, ob, od, oh, ow,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write scale * m + constant + linear * y, with m = g * act'(scale * y + shift)."""
    b, v, c, mask = _tile(V, C, BV, BC)
    s, o = _load_row(scale, b, c, C), _load_row(shift, b, c, C)
    k, q = _load_row(constant, b, c, C), _load_row(linear, b, c, C)
    x = tl.load(_pointers(y, v, b, c, H, W, yb, yd, yh, yw), mask=mask, other=0.0).to(tl.float32)
    u = tl.load(_pointers(g, v, b, c, H, W, gb, gd, gh, gw), mask=mask, other=0.0)
    m = u.to(tl.float32) * tl.where(s * x + o > 0, 1.0, slope)
    target = _pointers(out, v, b, c, H, W, ob, od, oh, ow)
    tl.store(target, (s * m + k + q * x).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def moments_kernel(
    y, out, V, C, H, W, yb, yd, yh, yw, B, TILES, BV: tl.constexpr, BC: tl.constexpr
):
    """Write mean and squared deviations of a program's voxels to out (P, 2, B, C)."""
    p, b = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = p * TILES * BV
    origin = _pointers(y, first + tl.arange(0, 1), b, c, H, W, yb, yd, yh, yw)
    pivot = tl.load(origin, mask=(c < C)[None, :], other=0.0).to(tl.float32)
    one = tl.zeros([BV, BC], tl.float32)
    two = tl.zeros([BV, BC], tl.float32)
    for t in range(TILES):
        v = first + t * BV + tl.arange(0, BV)
        mask = (v < V)[:, None] & (c < C)[None, :]
        x = tl.load(_pointers(y, v, b, c, H, W, yb, yd, yh, yw), mask=mask, other=0.0)
        d = tl.where(mask, x.to(tl.float32) - pivot, 0.0)
        one += d
        two += d * d
    n = tl.minimum(V - first, TILES * BV).to(tl.float32)
    a, s = tl.sum(one, 0), tl.sum(two, 0)
    mean = tl.sum(pivot, 0) + a / n
    target = out + ((p * 2) * B + b) * C + c
    tl.store(target, mean, mask=c < C)
    tl.store(target + B * C, tl.maximum(s - a * a / n, 0.0), mask=c < C)


@triton.jit
def _merge_moments(parts, n, inside, P, N, voxels, per_part, BP: tl.constexpr, BN: tl.constexpr):
    """Return mean and squared deviations of `voxels` values, given columns n of (P, 2, N)."""
    pivot = tl.load(parts + n, mask=inside, other=0.0)
    one = tl.zeros([BP, BN], tl.float32)
    two = tl.zeros([BP, BN], tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        mask = (p < P)[:, None] & inside[None, :]
        at = parts + p[:, None] * (2 * N) + n[None, :]
        size = tl.minimum(voxels - p * per_part, per_part).to(tl.float32)[:, None]
        d = tl.where(mask, tl.load(at, mask=mask, other=0.0) - pivot[None, :], 0.0)
        one += size * d
        two += tl.load(at + N, mask=mask, other=0.0) + size * d * d
    v, a, s = voxels * 1.0, tl.sum(one, 0), tl.sum(two, 0)
    return pivot + a / v, tl.maximum(s - a * a / v, 0.0)


@triton.jit
def _add_parts(parts, n, inside, P, N, BP: tl.constexpr, BN: tl.constexpr):
    """Return the sum over P of columns n of (P, N)."""
    total = tl.zeros([BP, BN], tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        mask = (p < P)[:, None] & inside[None, :]
        total += tl.load(parts + p[:, None] * N + n[None, :], mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_moments_kernel(
    parts, total, P, N, count, voxels, per_part, BP: tl.constexpr, BN: tl.constexpr
):
    """Add the moments of P parts (P, 2, N) to those of `count` values in total (2, N)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mean, squares = _merge_moments(parts, n, n < N, P, N, voxels, per_part, BP, BN)
    v, k = voxels * 1.0, count * 1.0
    known = n < tl.where(count > 0, N, 0)
    before = tl.load(total + n, mask=known, other=0.0)
    change = mean - before
    tl.store(total + n, before + change * (v / (k + v)), mask=n < N)
    squares += tl.load(total + N + n, mask=known, other=0.0) + change * change * (k * v / (k + v))
    tl.store(total + N + n, squares, mask=n < N)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def add_parts_kernel(parts, total, P, N, first, BP: tl.constexpr, BN: tl.constexpr):
    """Add the sum over P parts (P, N) to total (N), or overwrite it if `first`."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    before = tl.load(total + n, mask=n < tl.where(first > 0, 0, N), other=0.0)
    tl.store(total + n, before + _add_parts(parts, n, n < N, P, N, BP, BN), mask=n < N)


@triton.jit
def _members(program, B, C, GROUP: tl.constexpr, OVER_BATCH: tl.constexpr, MEMBERS: tl.constexpr):
    """Return the volumes, channels and mask of the values that a group has."""
    i = tl.arange(0, MEMBERS)
    if OVER_BATCH:
        return i // GROUP, program * GROUP + i % GROUP, i < B * GROUP
    else:
        groups = C // GROUP
        return program // groups + i * 0, program % groups * GROUP + i, i < GROUP


@triton.jit(do_not_specialize=["P", "B", "C", "voxels", "per_part"])
def fold_statistics_kernel(
    parts, weight, shift, bias, running_mean, running_var, batches, out,
    P, B, C, voxels, per_part, correction, eps, momentum,
    AFFINE: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr,
    GROUP: tl.constexpr, OVER_BATCH: tl.constexpr, BP: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write scale, shift, mean and 1 / standard deviation of a group to out (4, B, C).

    `parts` are the moments of P parts (P, 2, B, C) of `voxels` values.
    """
    b, c, inside = _members(tl.program_id(0), B, C, GROUP, OVER_BATCH, MEMBERS)
    at, size = b * C + c, B * C
    members = tl.sum(inside.to(tl.float32), 0)
    extra = tl.zeros([MEMBERS], tl.float32)
    if BIAS:
        extra += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    mean, squares = _merge_moments(parts, at, inside, P, size, voxels, per_part, BP, MEMBERS)
    mean += extra
    center = tl.sum(mean, 0) / members
    d = tl.where(inside, mean - center, 0.0)
    variance = (tl.sum(squares, 0) / voxels + tl.sum(d * d, 0)) / members
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.zeros([MEMBERS], tl.float32) + rstd
    offset = tl.zeros([MEMBERS], tl.float32)
    if AFFINE:
        scale *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        offset += tl.load(shift + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scale, mask=inside)
    tl.store(out + size + at, offset - (center - extra) * scale, mask=inside)
    tl.store(out + 2 * size + at, center - extra, mask=inside)
    tl.store(out + 3 * size + at, rstd + extra * 0.0, mask=inside)
    if RUNNING:  # batch norm: a group is one channel
        channel = tl.program_id(0)
        old = tl.load(running_mean + channel).to(tl.float32)
        new = old * (1.0 - momentum) + center * momentum
        tl.store(running_mean + channel, new.to(running_mean.dtype.element_ty))
        old = tl.load(running_var + channel).to(tl.float32)
        new = old * (1.0 - momentum) + variance * correction * momentum
        tl.store(running_var + channel, new.to(running_var.dtype.element_ty))
        if channel == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["P", "B", "C", "count", "volumes"])
def fold_gradient_kernel(
    parts, scale, mean, rstd, total, out, parameters, P, B, C, count, volumes,
    GROUP: tl.constexpr, OVER_BATCH: tl.constexpr, BP: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write `constant` and `linear` of a group's gradient to out (2, B, C).

    Write the gradients of norm bias, norm weight and convolution bias to parameters (3, C).
    """
    group, size = tl.program_id(0), B * C
    shift = tl.zeros([MEMBERS], tl.float32)
    weight = tl.zeros([MEMBERS], tl.float32)
    bias = tl.zeros([MEMBERS], tl.float32)
    for volume in range(volumes):
        program = volume * (C // GROUP) + group
        b, c, inside = _members(program, B, C, GROUP, OVER_BATCH, MEMBERS)
        at = b * C + c
        members = tl.sum(inside.to(tl.float32), 0)
        factor = tl.load(scale + at, mask=inside, other=0.0)
        inv = tl.load(rstd + at, mask=inside, other=1.0)
        one = _add_parts(parts, at, inside, P, 2 * size, BP, MEMBERS)
        two = _add_parts(parts + size, at, inside, P, 2 * size, BP, MEMBERS)
        p, q = tl.sum(factor / inv * one, 0) / members, tl.sum(factor / inv * two, 0) / members
        linear = -q * inv * inv / count
        constant = -p * inv / count - linear * tl.load(mean + at, mask=inside, other=0.0)
        tl.store(out + at, constant, mask=inside)
        tl.store(out + size + at, linear, mask=inside)
        shift += one
        weight += two
        if GROUP > 1:  # a norm of each channel subtracts the bias again
            center = tl.load(total + at, mask=inside, other=0.0)
            bias += factor * one + count * (constant + linear * center)
    i, sums = tl.arange(0, MEMBERS), (shift, weight, bias)
    for n in tl.static_range(3):
        if OVER_BATCH:  # a group is one channel
            tl.store(parameters + n * C + group, tl.sum(sums[n], 0))
        else:
            tl.store(parameters + n * C + group * GROUP + i, sums[n], mask=i < GROUP)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_sums_kernel(
    g, y, scale, shift, mean, rstd, out, slope,
    V, C, H, W, gb, gd, gh, gw, yb, yd, yh, yw, B, TILES, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write sums of m and m * (y - mean) * rstd over a program's voxels to out (P, 2, B, C)."""
    p, b = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    s, o = _load_row(scale, b, c, C), _load_row(shift, b, c, C)
    m0, i0 = _load_row(mean, b, c, C), _load_row(rstd, b, c, C)
    one = tl.zeros([BV, BC], tl.float32)
    two = tl.zeros([BV, BC], tl.float32)
    for t in range(TILES):
        v = (p * TILES + t) * BV + tl.arange(0, BV)
        mask = (v < V)[:, None] & (c < C)[None, :]
        x = tl.load(_pointers(y, v, b, c, H, W, yb, yd, yh, yw), mask=mask, other=0.0)
        u = tl.load(_pointers(g, v, b, c, H, W, gb, gd, gh, gw), mask=mask, other=0.0)
        x = x.to(tl.float32)
        m = u.to(tl.float32) * tl.where(s * x + o > 0, 1.0, slope)
        one += m
        two += m * ((x - m0) * i0)
    target = out + ((p * 2) * B + b) * C + c
    tl.store(target, tl.sum(one, 0), mask=c < C)
    tl.store(target + B * C, tl.sum(two, 0), mask=c < C)


@triton.jit
def _neighbors(position, size, low_first, low_size, LINEAR: tl.constexpr):
    """Return the two coarser neighbors, counted from low_first, and the second's weight."""
    if LINEAR:
        # In integers: a rounded product may be one row off, outside of the rows that there are.
        reach, step = position * (low_size - 1), tl.maximum(size - 1, 1)
        a = reach // step
        weight = (reach - a * step).to(tl.float32) / step
        return a - low_first, tl.minimum(a + 1, low_size - 1) - low_first, weight
    else:
        a = position * low_size // size - low_first
        return a, a, position.to(tl.float32) * 0.0


@triton.jit(do_not_specialize=UNSPECIALIZED)
def interpolate_kernel(
    low, out, V, C, H, W, lb, ld, lh, lw, ob, od, oh, ow,
    fd, nd, ld0, md, fh, nh, lh0, mh, fw, nw, lw0, mw,
    LINEAR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write some positions of the upsampled map."""
    b, v, c, mask = _tile(V, C, BV, BC)
    w, line = v % W, v // W
    da, db, dw = _neighbors(line // H + fd, nd, ld0, md, LINEAR)
    ha, hb, hw = _neighbors(line % H + fh, nh, lh0, mh, LINEAR)
    wa, wb, ww = _neighbors(w + fw, nw, lw0, mw, LINEAR)
    total, start = tl.zeros([BV, BC], tl.float32), tl.cast(b, tl.int64) * lb
    for k in tl.static_range(8 if LINEAR else 1):
        d, by_d = (db, dw) if k // 4 else (da, 1.0 - dw)
        h, by_h = (hb, hw) if k // 2 % 2 else (ha, 1.0 - hw)
        x, by_x = (wb, ww) if k % 2 else (wa, 1.0 - ww)
        at = d.to(tl.int64) * ld + h.to(tl.int64) * lh + x.to(tl.int64) * lw + start
        value = tl.load(low + at[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += (by_d * by_h * by_x)[:, None] * value
    target = _pointers(out, v, b, c, H, W, ob, od, oh, ow)
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def downsample_kernel(
    g, out, V, C, H, W, gb, gd, gh, gw, ob, od, oh, ow,
    first, count, size, low_first, low_size, taps,
    AXIS: tl.constexpr, LINEAR: tl.constexpr, ADD: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Run the transpose along one axis: each coarser position gathers from those that read it.

    Voxels are those of `out`; g has `count` positions from `first` along the axis.
    """
    b, v, c, mask = _tile(V, C, BV, BC)
    w, line = v % W, v // W
    h, d = line % H, line // H
    at = tl.cast(b, tl.int64) * gb
    if AXIS == 0:
        position, step = d, gd
        at += h.to(tl.int64) * gh + w.to(tl.int64) * gw
    elif AXIS == 1:
        position, step = h, gh
        at += d.to(tl.int64) * gd + w.to(tl.int64) * gw
    else:
        position, step = w, gw
        at += d.to(tl.int64) * gd + h.to(tl.int64) * gh
    position += low_first
    window = size // low_size
    ends, low_ends = tl.maximum(size - 1, 1), tl.maximum(low_size - 1, 1)
    if LINEAR:  # distances are integers, in units of 1 / ends of a coarser voxel
        start = tl.maximum(position - 1, 0) * (size - 1) // low_ends
        start = tl.where(low_size > 1, start, 0)
    else:
        start = position * window
    total = tl.zeros([BV, BC], tl.float32)
    for k in range(taps):
        u = start + k
        if LINEAR:
            distance = tl.abs(u * (low_size - 1) - position * (size - 1))
            weight = tl.maximum(1.0 - distance.to(tl.float32) / ends, 0.0)
        else:
            weight = tl.where(u // window == position, 1.0, 0.0)
        inside = (u >= first) & (u < first + count) & (weight > 0)
        source = at + (u - first).to(tl.int64) * step
        value = tl.load(g + source[:, None] + c[None, :], mask=mask & inside[:, None], other=0.0)
        total += weight[:, None] * value.to(tl.float32)
    target = _pointers(out, v, b, c, H, W, ob, od, oh, ow)
    if ADD:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
