"""Define the backward kernels of all pooling methods on CUDA: one lane per gradient, no atomics.

Where windows tile the volume, a lane has a window and writes all its elements; elsewhere a lane has
an element and reads every window that covers it.
"""

import triton
import triton.language as tl

from unet3d.pool.kernels.forward_triton import find_middle, soft_sums, split, store, weigh


@triton.jit
def tiled_kernel(
    grad, code, x, to,
    D, H, W, DO, HO, WO, DC, HC, LANES,  # DC, HC: windows per axis, cut ones included
    tau,
    POOL: tl.constexpr, NETWORK: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    GROUP: tl.constexpr,  # windows in a row when contiguous, C when channels-last
    CUT: tl.constexpr,  # the volume cuts off some windows at its end
    LAST: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a plane of windows; elements of cut windows get zero."""
    K: tl.constexpr = KD * KH * KW
    plane, o = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group, valid = o // GROUP, o < LANES
    full = valid
    if LAST:
        C: tl.constexpr = GROUP
        h, rest = plane % HC, plane // HC
        d, outer = rest % DC, rest // DC
        w, offset = group, group * KW * C + (o - group * C)
        if CUT:
            full = (o < tl.where((d < DO) & (h < HO), LANES, 0)) & (w < WO)
        source = ((outer.to(tl.int64) * DO + d) * HO + h) * WO * C + o
        row, top = h * KH, h * KH
    else:
        C: tl.constexpr = 1
        d, outer = plane % DC, plane // DC
        h, w = group, o - group * GROUP
        if CUT:
            full = (o < tl.where(d < DO, LANES, 0)) & (h < HO) & (w < WO)
        source = (outer.to(tl.int64) * DO + d) * HO * WO + (h * WO + w if CUT else o)
        row, top = 0, h * KH
        offset = top * W + w * (1 if PAIRS else KW)
    start = ((outer.to(tl.int64) * D + d * KD) * H + row) * W * C

    upper = tl.load(grad + source, mask=full, other=0.0).to(tl.float32)
    parts = ()
    if POOL == "approx_median":
        v, present = (), (o >= 0,) * K  # a cut window reads zeros, and its gradient is zero
        for i in tl.static_range(KD * KH):
            line = x + start + (i // KH * H + i % KH) * W * C
            if PAIRS:
                v += split(tl.load(line + offset, mask=full, other=0), x, HALF)
            else:
                for k in tl.static_range(KW):
                    v += (tl.load(line + k * C + offset, mask=full, other=0.0).to(tl.float32),)
        parts = soft_gradients(v, present, upper * 0.5, tau, NETWORK, HALF, BLOCK)
    elif POOL == "avg":
        for _ in tl.static_range(K):
            parts += ((upper / K).to(grad.dtype.element_ty),)
    else:
        share = upper
        if POOL == "median" and K % 2 == 0:
            share = upper * 0.5
        share = share.to(grad.dtype.element_ty)  # once, not per element
        bits = tl.load(code + source, mask=full, other=0).to(tl.int32)
        for k in tl.static_range(K):
            parts += (tl.where((bits & (1 << k)) != 0, share, 0.0),)

    for i in tl.static_range(KD * KH):
        line = to + start + (i // KH * H + i % KH) * W * C
        z, t = d * KD + i // KH, top + i % KH
        line_mask = valid
        if CUT:
            if LAST:
                line_mask = o < tl.where((z < D) & (t < H), LANES, 0)
            else:
                line_mask = (o < tl.where(z < D, LANES, 0)) & (t < H)
        if PAIRS:
            pair = join(parts[2 * i], parts[2 * i + 1], grad, HALF)
            tl.store(line + offset, pair.to(to.dtype.element_ty, bitcast=True), mask=line_mask)
        else:
            for k in tl.static_range(KW):
                mask = line_mask
                if CUT:
                    mask = line_mask & (w * KW + k < W)
                store(line + k * C + offset, parts[i * KW + k], mask)


@triton.jit
def join(even, odd, like, HALF: tl.constexpr):
    """Join two neighboring elements to one integer."""
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
    v, present, half, tau, NETWORK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the gradients of a window's elements; plain.py has the formula."""
    K: tl.constexpr = len(v)
    nan = v[0] != v[0]
    for k in tl.static_range(1, K):
        nan = nan | (v[k] != v[k])
    count = tl.full([BLOCK], K, tl.int32)
    low, high, a, b = find_middle(v, present, count, nan, NETWORK, False, HALF, BLOCK)
    total_a, offset_a = soft_sums(v, present, a, tau)
    total_b, offset_b = soft_sums(v, present, b, tau)
    through_a, through_b = tl.zeros_like(a), tl.zeros_like(b)
    share_a, share_b, inverse = 1.0 / total_a, 1.0 / total_b, 1.0 / tau
    direct = ()
    for k in tl.static_range(K):
        weight, d = weigh(v[k], present[k], a, tau)
        pull_a = weight * share_a * (d - offset_a) * sign(d) * inverse
        part = weight * share_a - pull_a
        weight, d = weigh(v[k], present[k], b, tau)
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
    """Return -1, 0 or 1."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def covering_kernel(
    grad, code, to,
    D, H, DO, HO, WO, ELEMENTS,  # ELEMENTS: elements of the input per plane
    TOTAL,
    POOL: tl.constexpr, CODE: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr,  # C is 1 when contiguous
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a plane of elements: sums over the windows that cover each."""
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
                    index = (dz * KH + dh) * KW + dw
                    if CODE == 1:
                        selected = ((byte >> index) & 1) == 1
                        single = (byte & (byte - 1)) == 0
                    elif CODE == 2:
                        selected, single = byte == index, byte == byte
                    elif CODE == 4:
                        second = tl.load(code + TOTAL + at, mask=covers, other=0).to(tl.int32)
                        selected = (byte == index) | (second == index)
                        single = byte == second
                    else:
                        if PADDED:
                            f, t, s = d * SD - PD, h * SH - PH, w * SW - PW
                            sheets = tl.minimum(f + KD, D) - tl.maximum(f, 0)
                            rows = tl.minimum(t + KH, H) - tl.maximum(t, 0)
                            columns = tl.minimum(s + KW, W) - tl.maximum(s, 0)
                            index = (
                                (dz + tl.minimum(f, 0)) * rows + dh + tl.minimum(t, 0)
                            ) * columns
                            index += dw + tl.minimum(s, 0)
                            single = (sheets * rows * columns) % 2 == 1
                        else:
                            single = (byte == byte) if K % 2 == 1 else (byte != byte)
                        large = ((1 + tl.sqrt((1 + 8 * byte).to(tl.float32))) / 2).to(tl.int32)
                        small = byte - large * (large - 1) // 2
                        pair = (index == large) | (index == small)
                        selected = tl.where(single, index == byte, pair)
                    total += tl.where(covers & selected, tl.where(single, upper, upper * 0.5), 0.0)
    store(to + plane.to(tl.int64) * ELEMENTS + o, total, valid)
