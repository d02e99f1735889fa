"""Pooling forward on CUDA: one program lane per window, for every pooling, window and layout.

The grid is one row of programs for each plane of the output, so that whatever is the same in a
plane is scalar, offsets within it are int32, and no lane divides by anything but a constant.
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x, y, code,
    D, H, W, DO, HO, OUTPUTS,  # of the input and the output; how many outputs a plane has
    TOTAL,  # outputs in all: how far the second byte of a code is from the first
    tau,
    POOL: tl.constexpr, CODE: tl.constexpr, NETWORK: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    GROUP: tl.constexpr,  # W' when contiguous, C when channels-last
    LAST: tl.constexpr,  # channels-last
    PAIRS: tl.constexpr,  # x is seen as integers of two elements each, and W counts those
    HALF: tl.constexpr,  # fp16 or bf16: in float32 their lowest 8 bits are free
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a plane's outputs and what their gradients need to know."""
    K: tl.constexpr = KD * KH * KW
    PADDED: tl.constexpr = PD + PH + PW > 0
    plane, o = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = o // GROUP
    if LAST:  # a plane is a row (n, d, h) of (w, c)
        C: tl.constexpr = GROUP
        h, rest = plane % HO, plane // HO
        d, outer = rest % DO, rest // DO
        top, left = h * SH - PH, group * SW - PW
        row, offset = top, left * C + (o - group * C)
    else:  # a plane is (n c, d) of (h, w)
        C: tl.constexpr = 1
        d, outer = plane % DO, plane // DO
        top, left = group * SH - PH, (o - group * GROUP) * (1 if PAIRS else SW) - PW
        row, offset = 0, top * W + left
    front = d * SD - PD
    first = x + ((outer.to(tl.int64) * D + front) * H + row) * W * C
    valid = o < OUTPUTS

    v, there = (), ()
    for i in tl.static_range(KD * KH):
        z, t = front + i // KH, top + i % KH
        line = first + (i // KH * H + i % KH) * W * C
        here = valid
        if PADDED:
            if LAST:  # scalars go into the bound: they are not mixed with masks
                here = o < tl.where((z >= 0) & (z < D) & (t >= 0) & (t < H), OUTPUTS, 0)
            else:
                here = (o < tl.where((z >= 0) & (z < D), OUTPUTS, 0)) & (t >= 0) & (t < H)
        if PAIRS:
            even, odd = split(tl.load(line + offset, mask=here, other=0), x, HALF)
            v += (even, odd)
            there += (here, here)
        else:
            for w in tl.static_range(KW):
                inside = here
                if PADDED:
                    inside = here & (left + w >= 0) & (left + w < W)
                v += (tl.load(line + w * C + offset, mask=inside, other=0.0).to(tl.float32),)
                there += (inside,)

    at = plane.to(tl.int64) * OUTPUTS + o
    if POOL == "avg":
        total = v[0]
        for k in tl.static_range(1, K):
            total += v[k]
        store(y + at, total / K, valid)
    elif POOL == "max":
        best, place = v[0], tl.full([BLOCK], -1 if PADDED else 0, tl.int32)
        for k in tl.static_range(0 if PADDED else 1, K):
            wins = (v[k] > best) | (v[k] != v[k])
            if PADDED:
                wins = (wins | (place < 0)) & there[k]
            best, place = tl.where(wins, v[k], best), tl.where(wins, k, place)
        store(y + at, best, valid)
        tl.store(code + at, ((1 << place) if CODE == 1 else place).to(tl.uint8), mask=valid)
    else:
        inside = tl.full([BLOCK], K, tl.int32)
        if PADDED:
            inside = tl.zeros([BLOCK], tl.int32)
            for k in tl.static_range(K):
                inside += there[k].to(tl.int32)
        nan = v[0] != v[0]
        for k in tl.static_range(1, K):
            nan = nan | (v[k] != v[k])
        low, high, a, b = middle(v, there, inside, nan, NETWORK, PADDED, HALF, BLOCK)
        if POOL == "median":
            store(y + at, tl.where(nan, float("nan"), a * 0.5 + b * 0.5), valid)
            if CODE == 1:
                byte = (1 << low) | (1 << high)
            elif CODE == 4:
                byte = low
                tl.store(code + TOTAL + at, high.to(tl.uint8), mask=valid)
            else:
                if PADDED:
                    low = local(low, front, top, left, D, H, W, KH, KW)
                    high = local(high, front, top, left, D, H, W, KH, KW)
                less, more = tl.minimum(low, high), tl.maximum(low, high)
                byte = tl.where(inside % 2 == 1, low, more * (more - 1) // 2 + less)
            tl.store(code + at, byte.to(tl.uint8), mask=valid)
        else:
            soft = soft_mean(v, there, a, tau) * 0.5 + soft_mean(v, there, b, tau) * 0.5
            store(y + at, tl.where(nan, float("nan"), soft), valid)


@triton.jit
def split(pair, x, HALF: tl.constexpr):
    """Two neighbouring elements from one integer, as float32."""
    if HALF:
        if x.dtype.element_ty == tl.int32:  # bfloat16 is the upper half of a float32
            even = (pair << 16).to(tl.float32, bitcast=True)
            odd = (pair & -65536).to(tl.float32, bitcast=True)
        else:  # float16, seen as uint32
            even = pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def store(to, value, mask):
    """Store in the type of the memory."""
    tl.store(to, value.to(to.dtype.element_ty), mask=mask)


@triton.jit
def middle(
    v, there, inside, nan,
    NETWORK: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The places and the values of the two middle elements, as in a stable sort.

    A key is an integer in the order of the values, with the place in its lowest 8 bits: in int32
    where the values leave them free, else in int64. Absent elements go below and above all others
    in turn.
    """
    K: tl.constexpr = len(v)
    M: tl.constexpr = (K - 1) // 2
    N: tl.constexpr = M + 1 if K > 1 else 0
    keys = ()
    absent = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(K):
        bits = v[k].to(tl.int32, bitcast=True)
        sign = bits >> 31
        ordered = (bits ^ (sign & 0x7FFFFFFF)) - sign  # as the floats are, both zeros 0
        if HALF:
            key = ordered + k
            if PADDED:
                key = tl.where(
                    there[k], key, tl.where(absent % 2 == 1, 0x7FFFFF00, -0x7FFFFF00) | k
                )
        else:
            key = (ordered.to(tl.int64) << 8) | k
            if PADDED:
                far = tl.where(absent % 2 == 1, 0x7FFFFFFF, -0x7FFFFFFF).to(tl.int64) << 8
                key = tl.where(there[k], key, far | k)
        if PADDED:
            absent += (~there[k]).to(tl.int32)
        keys += (key,)
    for c in tl.static_range(len(NETWORK)):
        keys = compare(keys, NETWORK[c][0], NETWORK[c][1], NETWORK[c][2])
    p, q = keys[M], keys[N]
    if PADDED:  # an odd number of elements has one in the middle: of K, the M-th or the next
        one = inside % 2 == 1
        if K % 2 == 1:
            q = tl.where(one, p, q)
        else:
            p = tl.where(one, q, p)
    elif K % 2 == 1:
        q = p
    low, high = (p & 0xFF).to(tl.int32), (q & 0xFF).to(tl.int32)
    if HALF:
        a, b = p & -256, q & -256
    else:
        a, b = (p >> 8).to(tl.int32), (q >> 8).to(tl.int32)
    a, b = (a + (a >> 31)) ^ ((a >> 31) & 0x7FFFFFFF), (b + (b >> 31)) ^ ((b >> 31) & 0x7FFFFFFF)
    first, second = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + 1
    if PADDED:
        first, second = tl.full([BLOCK], -1, tl.int32), tl.full([BLOCK], -1, tl.int32)
        for k in tl.static_range(K):
            second = tl.where(there[k] & (first >= 0) & (second < 0), k, second)
            first = tl.where(there[k] & (first < 0), k, first)
    low = tl.where(nan, first, low)
    high = tl.where(nan, tl.where(inside % 2 == 1, first, second), high)
    return low, high, a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)


@triton.jit
def compare(keys, i: tl.constexpr, j: tl.constexpr, keep: tl.constexpr):
    """The keys after one comparator; see network.py."""
    a, b = keys[i], keys[j]
    if keep & 1:
        keys = keys[:i] + (tl.minimum(a, b),) + keys[i + 1 :]  # noqa: RUF005 (Triton has no stars)
    if keep & 2:
        keys = keys[:j] + (tl.maximum(a, b),) + keys[j + 1 :]  # noqa: RUF005
    return keys


@triton.jit
def local(place, front, top, left, D, H, W, KH: tl.constexpr, KW: tl.constexpr):
    """A place among those elements of a window alone that lie inside the volume."""
    d, h, w = place // (KH * KW), place // KW % KH, place % KW
    rows = tl.minimum(top + KH, H) - tl.maximum(top, 0)
    columns = tl.minimum(left + KW, W) - tl.maximum(left, 0)
    d += tl.minimum(front, 0)
    return (d * rows + h + tl.minimum(top, 0)) * columns + w + tl.minimum(left, 0)


@triton.jit
def weigh(x, there, centre, tau):
    """An element's weight, and its distance from the centre unless that is infinite."""
    distance = tl.where(x == centre, 0.0, x - centre)
    rate = -1.4426950408889634 / tau  # exp(t) = exp2(t log2 e)
    weight = tl.where(there, tl.exp2(tl.abs(distance) * rate), 0.0)
    return weight, tl.where(weight > 0, distance, 0.0)


@triton.jit
def soft_sums(v, there, centre, tau):
    """The sum of the weights, and the soft mean's offset from the centre."""
    total, offset = tl.zeros_like(centre), tl.zeros_like(centre)
    for k in tl.static_range(len(v)):
        weight, distance = weigh(v[k], there[k], centre, tau)
        total += weight
        offset += weight * distance
    return total, offset / total


@triton.jit
def soft_mean(v, there, centre, tau):
    """The mean of a window's elements, weighted by their nearness to the centre."""
    return centre + soft_sums(v, there, centre, tau)[1]
