"""Pooling backward on CUDA: every gradient is written once, by one lane, and nothing is atomic.

Where windows tile the volume a lane has a window, and writes all its elements; elsewhere a lane has
an element, and asks every window that covers it.
"""

import triton
import triton.language as tl

from unet3d.pool.kernels.forward_triton import middle, soft_sums, split, store, weigh


@triton.jit
def tiled_kernel(
    grad, code, x, to,
    D, H, W, DO, HO, WO, DC, HC, LANES,  # DC, HC: windows per axis, with those that are cut off
    tau,
    POOL: tl.constexpr, NETWORK: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    GROUP: tl.constexpr,  # windows in a row when contiguous, C when channels-last
    CUT: tl.constexpr,  # some windows at the end are cut off
    LAST: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a plane of windows; the cut off ones at the end get zero."""
    K: tl.constexpr = KD * KH * KW
    plane, o = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group, valid = o // GROUP, o < LANES
    whole = valid
    if LAST:
        C: tl.constexpr = GROUP
        h, rest = plane % HC, plane // HC
        d, outer = rest % DC, rest // DC
        w, offset = group, group * KW * C + (o - group * C)
        if CUT:
            whole = (o < tl.where((d < DO) & (h < HO), LANES, 0)) & (w < WO)
        source = ((outer.to(tl.int64) * DO + d) * HO + h) * WO * C + o
        row, top = h * KH, h * KH
    else:
        C: tl.constexpr = 1
        d, outer = plane % DC, plane // DC
        h, w = group, o - group * GROUP
        if CUT:
            whole = (o < tl.where(d < DO, LANES, 0)) & (h < HO) & (w < WO)
        source = (outer.to(tl.int64) * DO + d) * HO * WO + (h * WO + w if CUT else o)
        row, top = 0, h * KH
        offset = top * W + w * (1 if PAIRS else KW)
    start = ((outer.to(tl.int64) * D + d * KD) * H + row) * W * C

    upper = tl.load(grad + source, mask=whole, other=0.0).to(tl.float32)
    parts = ()
    if POOL == "approx_median":
        v, there = (), (o >= 0,) * K  # a window cut off has zeros, and its gradient is zero
        for i in tl.static_range(KD * KH):
            line = x + start + (i // KH * H + i % KH) * W * C
            if PAIRS:
                v += split(tl.load(line + offset, mask=whole, other=0), x, HALF)
            else:
                for k in tl.static_range(KW):
                    v += (tl.load(line + k * C + offset, mask=whole, other=0.0).to(tl.float32),)
        parts = soft_gradients(v, there, upper * 0.5, tau, NETWORK, HALF, BLOCK)
    elif POOL == "avg":
        for _ in tl.static_range(K):
            parts += ((upper / K).to(grad.dtype.element_ty),)
    else:
        share = upper
        if POOL == "median" and K % 2 == 0:
            share = upper * 0.5
        share = share.to(grad.dtype.element_ty)  # once, and not for each element
        mask = tl.load(code + source, mask=whole, other=0).to(tl.int32)
        for k in tl.static_range(K):
            parts += (tl.where((mask & (1 << k)) != 0, share, 0.0),)

    for i in tl.static_range(KD * KH):
        line = to + start + (i // KH * H + i % KH) * W * C
        z, t = d * KD + i // KH, top + i % KH
        here = valid
        if CUT:
            if LAST:
                here = o < tl.where((z < D) & (t < H), LANES, 0)
            else:
                here = (o < tl.where(z < D, LANES, 0)) & (t < H)
        if PAIRS:
            pair = join(parts[2 * i], parts[2 * i + 1], grad, HALF)
            tl.store(line + offset, pair.to(to.dtype.element_ty, bitcast=True), mask=here)
        else:
            for k in tl.static_range(KW):
                inside = here
                if CUT:
                    inside = here & (w * KW + k < W)
                store(line + k * C + offset, parts[i * KW + k], inside)


@triton.jit
def join(even, odd, like, HALF: tl.constexpr):
    """Two neighbouring elements as one integer."""
    if HALF:
        a = even.to(like.dtype.element_ty).to(tl.uint16, bitcast=True).to(tl.uint32)
        b = odd.to(like.dtype.element_ty).to(tl.uint16, bitcast=True).to(tl.uint32)
        pair = a | (b << 16)
    else:
        a = even.to(tl.uint32, bitcast=True).to(tl.uint64)
        b = odd.to(tl.uint32, bitcast=True).to(tl.uint64)
        pair = a | (b << 32)
    return pair


@triton.jit
def soft_gradients(
    v, there, half, tau, NETWORK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """What each element of a window receives from its smooth median; see the reference."""
    K: tl.constexpr = len(v)
    nan = v[0] != v[0]
    for k in tl.static_range(1, K):
        nan = nan | (v[k] != v[k])
    inside = tl.full([BLOCK], K, tl.int32)
    low, high, a, b = middle(v, there, inside, nan, NETWORK, False, HALF, BLOCK)
    total_a, offset_a = soft_sums(v, there, a, tau)
    total_b, offset_b = soft_sums(v, there, b, tau)
    through_a, through_b = tl.zeros_like(a), tl.zeros_like(b)
    share_a, share_b, inverse = 1.0 / total_a, 1.0 / total_b, 1.0 / tau
    direct = ()
    for k in tl.static_range(K):
        weight, d = weigh(v[k], there[k], a, tau)
        pull_a = weight * share_a * (d - offset_a) * sign(d) * inverse
        part = weight * share_a - pull_a
        weight, d = weigh(v[k], there[k], b, tau)
        pull_b = weight * share_b * (d - offset_b) * sign(d) * inverse
        direct += (part + weight * share_b - pull_b,)
        through_a += pull_a
        through_b += pull_b
    parts = ()
    for k in tl.static_range(K):
        part = direct[k] + tl.where(low == k, through_a, 0.0) + tl.where(high == k, through_b, 0.0)
        parts += (half * tl.where(nan, float("nan"), part),)
    return parts


@triton.jit
def sign(x):
    """-1, 0 or 1."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def covering_kernel(
    grad, code, to,
    D, H, DO, HO, WO, ELEMENTS,  # ELEMENTS of the input in a plane
    TOTAL,
    POOL: tl.constexpr, CODE: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr,  # C is 1 when contiguous
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a plane of elements: the sum over the windows that cover each."""
    K: tl.constexpr = KD * KH * KW
    PADDED: tl.constexpr = PD + PH + PW > 0
    plane, o = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if LAST:
        i, rest = plane % H, plane // H
        z, outer = rest % D, rest // D
        j = o // C
        c = o - j * C
    else:
        z, outer = plane % D, plane // D
        i = o // W
        j, c = o - i * W, 0
    valid = o < ELEMENTS
    total = tl.zeros([BLOCK], tl.float32)
    for nd in tl.static_range((KD + SD - 1) // SD):
        for nh in tl.static_range((KH + SH - 1) // SH):
            for nw in tl.static_range((KW + SW - 1) // SW):
                d, h, w = (z + PD) // SD - nd, (i + PH) // SH - nh, (j + PW) // SW - nw
                dz, dh, dw = z + PD - d * SD, i + PH - h * SH, j + PW - w * SW
                deep = (d >= 0) & (d < DO) & (dz < KD)
                high = (h >= 0) & (h < HO) & (dh < KH)
                if LAST:
                    covers = valid & (o < tl.where(deep & high, ELEMENTS, 0))
                else:
                    covers = valid & (o < tl.where(deep, ELEMENTS, 0)) & high
                covers = covers & (w >= 0) & (w < WO) & (dw < KW)
                plane_of = (outer.to(tl.int64) * DO + d) * HO * WO * C
                at = plane_of + (h * WO + w) * C + c
                upper = tl.load(grad + at, mask=covers, other=0.0).to(tl.float32)
                if POOL == "avg":
                    total += upper / K
                else:
                    byte = tl.load(code + at, mask=covers, other=0).to(tl.int32)
                    place = (dz * KH + dh) * KW + dw
                    if CODE == 1:
                        taken = ((byte >> place) & 1) == 1
                        one = (byte & (byte - 1)) == 0
                    elif CODE == 2:
                        taken, one = byte == place, byte == byte
                    elif CODE == 4:
                        second = tl.load(code + TOTAL + at, mask=covers, other=0).to(tl.int32)
                        taken = (byte == place) | (second == place)
                        one = byte == second
                    else:
                        if PADDED:
                            f, t, s = d * SD - PD, h * SH - PH, w * SW - PW
                            sheets = tl.minimum(f + KD, D) - tl.maximum(f, 0)
                            rows = tl.minimum(t + KH, H) - tl.maximum(t, 0)
                            columns = tl.minimum(s + KW, W) - tl.maximum(s, 0)
                            place = (
                                (dz + tl.minimum(f, 0)) * rows + dh + tl.minimum(t, 0)
                            ) * columns
                            place += dw + tl.minimum(s, 0)
                            one = (sheets * rows * columns) % 2 == 1
                        else:
                            one = (byte == byte) if K % 2 == 1 else (byte != byte)
                        more = ((1 + tl.sqrt((1 + 8 * byte).to(tl.float32))) / 2).to(tl.int32)
                        less = byte - more * (more - 1) // 2
                        pair = (place == more) | (place == less)
                        taken = tl.where(one, place == byte, pair)
                    total += tl.where(covers & taken, tl.where(one, upper, upper * 0.5), 0.0)
    store(to + plane.to(tl.int64) * ELEMENTS + o, total, valid)
