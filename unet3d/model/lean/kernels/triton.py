"""The lean blocks' kernels on CUDA: channels-last maps, or some rows or channels of one.

A program works on a tile of voxels x channels. Voxels are numbered within a volume; where they lie
is worked out once for each, in int64, and channels are side by side. Sums are made in float32 over
a program's own voxels and added up afterwards: no atomics, so that results repeat.
"""

import triton
import triton.language as tl

ANY = """V H W B TILES first count size low_first low_size taps
fd nd ld0 md fh nh lh0 mh fw nw lw0 mw""".split()
"""Numbers that no kernel is compiled anew for: levels and slabs have many, and gain nothing by it.

Strides are told apart: where they are multiples of 16, channels are read in wide loads.
"""


@triton.jit
def _voxels(v, b, H, W, sb, sd, sh, sw):
    """Where voxels lie: (D, H, W) at strides sd, sh, sw in volume b."""
    w, line = v % W, v // W
    h, d = line % H, line // H
    inside = d.to(tl.int64) * sd + h.to(tl.int64) * sh + w.to(tl.int64) * sw
    return tl.cast(b, tl.int64) * sb + inside


@triton.jit(do_not_specialize=ANY)
def normalize_kernel(
    y, out, scale, shift, slope,
    V, C, H, W, yb, yd, yh, yw, ob, od, oh, ow,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write act(scale * y + shift)."""
    b = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    here = (v < V)[:, None] & (c < C)[None, :]
    s = tl.load(scale + b * C + c, mask=c < C, other=0.0)[None, :]
    o = tl.load(shift + b * C + c, mask=c < C, other=0.0)[None, :]
    x = tl.load(y + _voxels(v, b, H, W, yb, yd, yh, yw)[:, None] + c[None, :], mask=here, other=0.0)
    n = s * x.to(tl.float32) + o
    n = n * tl.where(n < 0, slope, 1.0)
    to = out + _voxels(v, b, H, W, ob, od, oh, ow)[:, None] + c[None, :]
    tl.store(to, n.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=ANY)
def gradient_kernel(
    g, y, out, scale, shift, constant, linear, slope,
    V, C, H, W, gb, gd, gh, gw, yb, yd, yh, yw, ob, od, oh, ow,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write scale * m + constant + linear * y, with m = g * act'(scale * y + shift)."""
    b = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    here = (v < V)[:, None] & (c < C)[None, :]
    s = tl.load(scale + b * C + c, mask=c < C, other=0.0)[None, :]
    o = tl.load(shift + b * C + c, mask=c < C, other=0.0)[None, :]
    k = tl.load(constant + b * C + c, mask=c < C, other=0.0)[None, :]
    q = tl.load(linear + b * C + c, mask=c < C, other=0.0)[None, :]
    x = tl.load(y + _voxels(v, b, H, W, yb, yd, yh, yw)[:, None] + c[None, :], mask=here, other=0.0)
    u = tl.load(g + _voxels(v, b, H, W, gb, gd, gh, gw)[:, None] + c[None, :], mask=here, other=0.0)
    x = x.to(tl.float32)
    m = u.to(tl.float32) * tl.where(s * x + o > 0, 1.0, slope)
    to = out + _voxels(v, b, H, W, ob, od, oh, ow)[:, None] + c[None, :]
    tl.store(to, (s * m + k + q * x).to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=ANY)
def moments_kernel(
    y, out, V, C, H, W, yb, yd, yh, yw, B, TILES,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of a program's voxels: mean and squared deviations into out (P, 2, B, C)."""
    p, b = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = p * TILES * BV
    origin = _voxels(first + tl.arange(0, 1), b, H, W, yb, yd, yh, yw)
    about = tl.load(y + origin[:, None] + c[None, :], mask=(c < C)[None, :], other=0.0).to(
        tl.float32
    )
    one = tl.zeros([BV, BC], tl.float32)
    two = tl.zeros([BV, BC], tl.float32)
    for t in range(TILES):
        v = first + t * BV + tl.arange(0, BV)
        here = (v < V)[:, None] & (c < C)[None, :]
        at = _voxels(v, b, H, W, yb, yd, yh, yw)
        x = tl.load(y + at[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
        d = tl.where(here, x - about, 0.0)
        one += d
        two += d * d
    n = tl.minimum(V - first, TILES * BV).to(tl.float32)
    a, s = tl.sum(one, 0), tl.sum(two, 0)
    mean = tl.sum(about, 0) + a / n
    to = out + ((p * 2) * B + b) * C + c
    tl.store(to, mean, mask=c < C)
    tl.store(to + B * C, tl.maximum(s - a * a / n, 0.0), mask=c < C)


@triton.jit(do_not_specialize=ANY)
def gradient_sums_kernel(
    g, y, scale, shift, mean, inverse, out, slope,
    V, C, H, W, gb, gd, gh, gw, yb, yd, yh, yw, B, TILES,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of a program's voxels: sums of m and of m * (y - mean) * inverse, into out (P, 2, B, C)."""
    p, b = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    s = tl.load(scale + b * C + c, mask=c < C, other=0.0)[None, :]
    o = tl.load(shift + b * C + c, mask=c < C, other=0.0)[None, :]
    m0 = tl.load(mean + b * C + c, mask=c < C, other=0.0)[None, :]
    i0 = tl.load(inverse + b * C + c, mask=c < C, other=0.0)[None, :]
    one = tl.zeros([BV, BC], tl.float32)
    two = tl.zeros([BV, BC], tl.float32)
    for t in range(TILES):
        v = (p * TILES + t) * BV + tl.arange(0, BV)
        here = (v < V)[:, None] & (c < C)[None, :]
        yat, gat = _voxels(v, b, H, W, yb, yd, yh, yw), _voxels(v, b, H, W, gb, gd, gh, gw)
        x = tl.load(y + yat[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
        u = tl.load(g + gat[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
        m = u * tl.where(s * x + o > 0, 1.0, slope)
        one += m
        two += m * ((x - m0) * i0)
    to = out + ((p * 2) * B + b) * C + c
    tl.store(to, tl.sum(one, 0), mask=c < C)
    tl.store(to + B * C, tl.sum(two, 0), mask=c < C)


@triton.jit
def _between(place, size, low_first, low_size, LINEAR: tl.constexpr):
    """The coarser places that a place is between, from low_first, and the second's weight."""
    if LINEAR:
        at = place.to(tl.float32) * ((low_size - 1) * 1.0 / tl.maximum(size - 1, 1))
        a = tl.minimum(at.to(tl.int32), low_size - 1)
        weight = at - a.to(tl.float32)
        return a - low_first, tl.minimum(a + 1, low_size - 1) - low_first, weight
    else:
        a = place * low_size // size - low_first
        return a, a, place.to(tl.float32) * 0.0


@triton.jit(do_not_specialize=ANY)
def interpolate_kernel(
    low, out, V, C, H, W, lb, ld, lh, lw, ob, od, oh, ow,
    fd, nd, ld0, md, fh, nh, lh0, mh, fw, nw, lw0, mw,
    LINEAR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write some places of the upsampled map."""
    b = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    here = (v < V)[:, None] & (c < C)[None, :]
    w, line = v % W, v // W
    da, db, dw = _between(line // H + fd, nd, ld0, md, LINEAR)
    ha, hb, hw = _between(line % H + fh, nh, lh0, mh, LINEAR)
    wa, wb, ww = _between(w + fw, nw, lw0, mw, LINEAR)
    total = tl.zeros([BV, BC], tl.float32)
    for k in tl.static_range(8 if LINEAR else 1):
        d, by_d = (db, dw) if k // 4 else (da, 1.0 - dw)
        h, by_h = (hb, hw) if k // 2 % 2 else (ha, 1.0 - hw)
        x, by_x = (wb, ww) if k % 2 else (wa, 1.0 - ww)
        at = (
            d.to(tl.int64) * ld
            + h.to(tl.int64) * lh
            + x.to(tl.int64) * lw
            + tl.cast(b, tl.int64) * lb
        )
        value = tl.load(low + at[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
        total += (by_d * by_h * by_x)[:, None] * value
    to = out + _voxels(v, b, H, W, ob, od, oh, ow)[:, None] + c[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=ANY)
def lower_kernel(
    g, out, V, C, H, W, gb, gd, gh, gw, ob, od, oh, ow,
    first, count, size, low_first, low_size, taps,
    AXIS: tl.constexpr, LINEAR: tl.constexpr, ADD: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One axis of the transpose: each coarser place gathers from the places that read it.

    Voxels are those of `out`; g has `count` places from `first` along the axis.
    """
    b = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    here = (v < V)[:, None] & (c < C)[None, :]
    w, line = v % W, v // W
    h, d = line % H, line // H
    at = tl.cast(b, tl.int64) * gb
    if AXIS == 0:
        place, step = d, gd
        at += h.to(tl.int64) * gh + w.to(tl.int64) * gw
    elif AXIS == 1:
        place, step = h, gh
        at += d.to(tl.int64) * gd + w.to(tl.int64) * gw
    else:
        place, step = w, gw
        at += d.to(tl.int64) * gd + h.to(tl.int64) * gh
    place += low_first
    window = size // low_size
    if LINEAR:  # readers are nearer than 1 / reach, on both sides
        reach = (low_size - 1) * 1.0 / tl.maximum(size - 1, 1)
        begin = tl.maximum((place - 1).to(tl.float32) / tl.maximum(reach, 1e-9) - 0.5, 0.0)
        start = tl.where(low_size > 1, begin.to(tl.int32), 0)
    else:
        reach = 1.0 / window
        start = place * window
    total = tl.zeros([BV, BC], tl.float32)
    for k in range(taps):
        u = start + k
        if LINEAR:
            weight = tl.maximum(1.0 - tl.abs(u.to(tl.float32) * reach - place.to(tl.float32)), 0.0)
        else:
            weight = tl.where(u // window == place, 1.0, 0.0)
        inside = (u >= first) & (u < first + count) & (weight > 0)
        from_ = at + (u - first).to(tl.int64) * step
        value = tl.load(g + from_[:, None] + c[None, :], mask=here & inside[:, None], other=0.0)
        total += weight[:, None] * value.to(tl.float32)
    to = out + _voxels(v, b, H, W, ob, od, oh, ow)[:, None] + c[None, :]
    if ADD:
        total += tl.load(to, mask=here, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=here)
