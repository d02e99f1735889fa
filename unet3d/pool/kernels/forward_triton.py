"""Define the forward kernel of all pooling methods on CUDA: one lane per window.

The grid has one row of programs per plane of the output, so that what is constant in a plane is
scalar, offsets within it are int32, and lanes divide by constants only.
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x, y, code,
    D, H, W, DO, HO, OUTPUTS,  # sizes of input and output; outputs per plane
    TOTAL,  # number of outputs: the distance from a code's first to its second byte
    tau,
    POOL: tl.constexpr, CODE: tl.constexpr, NETWORK: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    GROUP: tl.constexpr,  # W' when contiguous, C when channels-last
    LAST: tl.constexpr,  # channels-last
    PAIRS: tl.constexpr,  # x is read as integers of two elements each, and W counts those
    HALF: tl.constexpr,  # fp16 or bf16: as float32 their lowest 8 bits are zero
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a plane's outputs and their codes."""
    K: tl.constexpr = KD * KH * KW
    PADDED: tl.constexpr = PD + PH + PW > 0
    plane, o = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = o // GROUP
    if LAST:  # a plane is (n, d, h), of (w, c)
        C: tl.constexpr = GROUP
        h, rest = plane % HO, plane // HO
        d, outer = rest % DO, rest // DO
        top, left = h * SH - PH, group * SW - PW
        row, offset = top, left * C + (o - group * C)
    else:  # a plane is (n c, d), of (h, w)
        C: tl.constexpr = 1
        d, outer = plane % DO, plane // DO
        top, left = group * SH - PH, (o - group * GROUP) * (1 if PAIRS else SW) - PW
        row, offset = 0, top * W + left
    front = d * SD - PD
    first = x + ((outer.to(tl.int64) * D + front) * H + row) * W * C
    valid = o < OUTPUTS

    v, present = (), ()
    for i in tl.static_range(KD * KH):
        z, t = front + i // KH, top + i % KH
        line = first + (i // KH * H + i % KH) * W * C
        line_mask = valid
        if PADDED:
            if LAST:  # scalar conditions go into the bound, not into masks
                line_mask = o < tl.where((z >= 0) & (z < D) & (t >= 0) & (t < H), OUTPUTS, 0)
            else:
                line_mask = (o < tl.where((z >= 0) & (z < D), OUTPUTS, 0)) & (t >= 0) & (t < H)
        if PAIRS:
            even, odd = split(tl.load(line + offset, mask=line_mask, other=0), x, HALF)
            v += (even, odd)
            present += (line_mask, line_mask)
        else:
            for w in tl.static_range(KW):
                mask = line_mask
                if PADDED:
                    mask = line_mask & (left + w >= 0) & (left + w < W)
                v += (tl.load(line + w * C + offset, mask=mask, other=0.0).to(tl.float32),)
                present += (mask,)

    at = plane.to(tl.int64) * OUTPUTS + o
    if POOL == "avg":
        total = v[0]
        for k in tl.static_range(1, K):
            total += v[k]
        store(y + at, total / K, valid)
    elif POOL == "max":
        best, index = v[0], tl.full([BLOCK], -1 if PADDED else 0, tl.int32)
        for k in tl.static_range(0 if PADDED else 1, K):
            wins = (v[k] > best) | (v[k] != v[k])
            if PADDED:
                wins = (wins | (index < 0)) & present[k]
            best, index = tl.where(wins, v[k], best), tl.where(wins, k, index)
        store(y + at, best, valid)
        tl.store(code + at, ((1 << index) if CODE == 1 else index).to(tl.uint8), mask=valid)
    else:
        count = tl.full([BLOCK], K, tl.int32)
        if PADDED:
            count = tl.zeros([BLOCK], tl.int32)
            for k in tl.static_range(K):
                count += present[k].to(tl.int32)
        nan = v[0] != v[0]
        for k in tl.static_range(1, K):
            nan = nan | (v[k] != v[k])
        low, high, a, b = find_middle(v, present, count, nan, NETWORK, PADDED, HALF, BLOCK)
        if POOL == "median":
            store(y + at, tl.where(nan, float("nan"), a * 0.5 + b * 0.5), valid)
            if CODE == 1:
                byte = (1 << low) | (1 << high)
            elif CODE == 4:
                byte = low
                tl.store(code + TOTAL + at, high.to(tl.uint8), mask=valid)
            else:
                if PADDED:
                    low = to_local(low, front, top, left, D, H, W, KH, KW)
                    high = to_local(high, front, top, left, D, H, W, KH, KW)
                small, large = tl.minimum(low, high), tl.maximum(low, high)
                byte = tl.where(count % 2 == 1, low, large * (large - 1) // 2 + small)
            tl.store(code + at, byte.to(tl.uint8), mask=valid)
        else:
            soft = soft_mean(v, present, a, tau) * 0.5 + soft_mean(v, present, b, tau) * 0.5
            store(y + at, tl.where(nan, float("nan"), soft), valid)


@triton.jit
def split(pair, x, HALF: tl.constexpr):
    """Split an integer into two neighboring elements, as float32."""
    if HALF:
        if x.dtype.element_ty == tl.int32:  # bfloat16 is the upper half of a float32
            even = (pair << 16).to(tl.float32, bitcast=True)
            odd = (pair & -65536).to(tl.float32, bitcast=True)
        else:  # float16, read as uint32
            even = pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def store(to, value, mask):
    """Store in the dtype of the memory."""
    tl.store(to, value.to(to.dtype.element_ty), mask=mask)


@triton.jit
def find_middle(
    v, present, count, nan,
    NETWORK: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the indices and values of the two middle elements, as a stable sort would.

    A key is an integer in the order of the values with the index in its lowest 8 bits: int32 where
    the values leave these free, else int64. Absent elements sort alternately below and above all
    others.
    """
    K: tl.constexpr = len(v)
    M: tl.constexpr = (K - 1) // 2
    N: tl.constexpr = M + 1 if K > 1 else 0
    keys = ()
    absent = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(K):
        bits = v[k].to(tl.int32, bitcast=True)
        sign = bits >> 31
        # In the order of the floats; both zeros are 0.
        ordered = (bits ^ (sign & 0x7FFFFFFF)) - sign
        if HALF:
            key = ordered + k
            if PADDED:
                key = tl.where(
                    present[k], key, tl.where(absent % 2 == 1, 0x7FFFFF00, -0x7FFFFF00) | k
                )
        else:
            key = (ordered.to(tl.int64) << 8) | k
            if PADDED:
                far = tl.where(absent % 2 == 1, 0x7FFFFFFF, -0x7FFFFFFF).to(tl.int64) << 8
                key = tl.where(present[k], key, far | k)
        if PADDED:
            absent += (~present[k]).to(tl.int32)
        keys += (key,)
    for c in tl.static_range(len(NETWORK)):
        keys = compare(keys, NETWORK[c][0], NETWORK[c][1], NETWORK[c][2])
    p, q = keys[M], keys[N]
    if PADDED:  # an odd number of elements has one middle: the M-th of K or the next
        odd = count % 2 == 1
        if K % 2 == 1:
            q = tl.where(odd, p, q)
        else:
            p = tl.where(odd, q, p)
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
            second = tl.where(present[k] & (first >= 0) & (second < 0), k, second)
            first = tl.where(present[k] & (first < 0), k, first)
    low = tl.where(nan, first, low)
    high = tl.where(nan, tl.where(count % 2 == 1, first, second), high)
    return low, high, a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)


@triton.jit
def compare(keys, i: tl.constexpr, j: tl.constexpr, outputs: tl.constexpr):
    """Apply one comparator of a sorting network to the keys; see sorting_network.py."""
    a, b = keys[i], keys[j]
    if outputs & 1:
        keys = keys[:i] + (tl.minimum(a, b),) + keys[i + 1 :]  # noqa: RUF005 (Triton has no unpacking)
    if outputs & 2:
        keys = keys[:j] + (tl.maximum(a, b),) + keys[j + 1 :]  # noqa: RUF005
    return keys


@triton.jit
def to_local(index, front, top, left, D, H, W, KH: tl.constexpr, KW: tl.constexpr):
    """Return an index that counts only the elements of a window inside the volume."""
    d, h, w = index // (KH * KW), index // KW % KH, index % KW
    rows = tl.minimum(top + KH, H) - tl.maximum(top, 0)
    columns = tl.minimum(left + KW, W) - tl.maximum(left, 0)
    d += tl.minimum(front, 0)
    return (d * rows + h + tl.minimum(top, 0)) * columns + w + tl.minimum(left, 0)


@triton.jit
def weigh(x, present, center, tau):
    """Return an element's weight, and its distance from the center, 0 for weight 0."""
    distance = tl.where(x == center, 0.0, x - center)
    rate = -1.4426950408889634 / tau  # exp(t) = exp2(t log2 e)
    weight = tl.where(present, tl.exp2(tl.abs(distance) * rate), 0.0)
    return weight, tl.where(weight > 0, distance, 0.0)


@triton.jit
def soft_sums(v, present, center, tau):
    """Return the sum of the weights, and the soft mean's offset from the center."""
    total, offset = tl.zeros_like(center), tl.zeros_like(center)
    for k in tl.static_range(len(v)):
        weight, distance = weigh(v[k], present[k], center, tau)
        total += weight
        offset += weight * distance
    return total, offset / total


@triton.jit
def soft_mean(v, present, center, tau):
    """Return the mean of a window's elements, weighted by their closeness to the center."""
    return center + soft_sums(v, present, center, tau)[1]
