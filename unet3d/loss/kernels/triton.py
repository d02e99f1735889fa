"""Define the CUDA kernels of Dice and cross-entropy.

A program works on a tile of voxels x classes (or regions). Voxels are evenly spaced, so logits are
contiguous or channels-last. Everything is computed in float32; a program sums its own voxels, and
the sums are added afterwards: without atomics, results are deterministic.
"""

import triton
import triton.language as tl

UNSPECIALIZED = ["V", "B", "K", "TILES", "GAMMA", "SMOOTHING"]
TINY = tl.constexpr(1e-30)


@triton.jit
def _load(
    logits, labels, table, v, k, b, V, K, REGIONS: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """Return logits in float32, whether a class is the label, and which voxels are not ignored."""
    if LAST:
        inside = v.to(tl.int64)[:, None] * K + k[None, :]
    else:
        inside = k.to(tl.int64)[None, :] * V + v[:, None]
    at = tl.cast(b, tl.int64) * V * K + inside
    mask = (v < V)[:, None] & (k < K)[None, :]
    # Exponentials of missing classes are 0; their sigmoids are masked by the caller.
    x = tl.load(logits + at, mask=mask, other=-float("inf")).to(tl.float32)
    ignored: tl.constexpr = 32767 if labels.dtype.element_ty == tl.int16 else 255
    y = tl.load(labels + tl.cast(b, tl.int64) * V + v, mask=v < V, other=ignored).to(tl.int32)
    is_counted = y != ignored
    valid = is_counted[:, None] & mask
    if REGIONS:
        is_class = tl.load(table + k[None, :] * 256 + y[:, None], mask=valid, other=0) != 0
    else:
        is_class = (y[:, None] == k[None, :]) & valid
    return x, is_class, is_counted, at, mask


@triton.jit
def _softmax(x):
    """Return the logarithm of the softmax over classes; a tile has at least one."""
    top = tl.max(x, 1)
    top = tl.where(top == -float("inf"), 0.0, top)  # voxels beyond the last one
    shifted = x - top[:, None]
    total = tl.sum(tl.exp(shifted), 1)
    return shifted - tl.log(tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def _power(x, exponent):
    """Return x ** exponent for x >= 0; 0 where x is 0, unless the exponent is."""
    return tl.exp(exponent * tl.log(tl.maximum(x, TINY)))


@triton.jit
def _smooth(is_class, smoothing, classes):
    """Return the probability of a class that its label stands for."""
    return tl.where(is_class, 1.0 - smoothing, 0.0) + smoothing / classes


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_terms_kernel(
    logits, labels, table, out, V, B, K, TILES, GAMMA, SMOOTHING,
    BV: tl.constexpr, BK: tl.constexpr, REGIONS: tl.constexpr, LAST: tl.constexpr,
    FOCAL: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Write the terms of dice_terms.sum_terms over a program's voxels to out (P, 5, B, K)."""
    p, b = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BK)
    overlap = tl.zeros([BV, BK], tl.float32)
    predicted = tl.zeros([BV, BK], tl.float32)
    reference = tl.zeros([BV, BK], tl.float32)
    entropy = tl.zeros([BV, BK], tl.float32)
    voxels = tl.zeros([BV], tl.float32)
    for t in range(TILES):
        v = (p * TILES + t) * BV + tl.arange(0, BV)
        x, is_class, is_counted, _, mask = _load(
            logits, labels, table, v, k, b, V, K, REGIONS, LAST
        )
        valid = is_counted[:, None] & mask
        if REGIONS:
            x = tl.where(valid, x, 0.0)
            probability = tl.sigmoid(x)
            target = _smooth(is_class, SMOOTHING, 2) if SMOOTH else is_class.to(tl.float32)
            cross = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))) - x * target
            if FOCAL:
                cross *= _power(1.0 - tl.exp(-cross), GAMMA)
            entropy += tl.where(valid, cross, 0.0)
            voxels += tl.where(is_counted, 1.0, 0.0)
        else:
            log_p = _softmax(x)
            probability = tl.exp(log_p)
            cross = log_p * _power(1.0 - probability, GAMMA) if FOCAL else log_p
            if SMOOTH:
                entropy -= tl.where(valid, cross * _smooth(is_class, SMOOTHING, K), 0.0)
            else:
                entropy -= tl.where(is_class, cross, 0.0)
        overlap += tl.where(is_class, probability, 0.0)
        predicted += tl.where(valid, probability, 0.0)
        reference += is_class.to(tl.float32)
    counted = tl.sum(voxels, 0) + k * 0.0 if REGIONS else tl.sum(reference, 0)
    target = out + p * 5 * B * K + b * K + k
    tl.store(target, tl.sum(overlap, 0), mask=k < K)
    tl.store(target + B * K, tl.sum(predicted, 0), mask=k < K)
    tl.store(target + 2 * B * K, tl.sum(entropy, 0), mask=k < K)
    tl.store(target + 3 * B * K, tl.sum(reference, 0), mask=k < K)
    tl.store(target + 4 * B * K, counted, mask=k < K)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    logits, labels, table, grad, out, V, B, K, GAMMA, SMOOTHING,
    BV: tl.constexpr, BK: tl.constexpr, REGIONS: tl.constexpr, LAST: tl.constexpr,
    FOCAL: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Write dice_terms.compute_gradient of a tile."""
    b = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    x, is_class, is_counted, at, mask = _load(logits, labels, table, v, k, b, V, K, REGIONS, LAST)
    of_class = grad + b * K + k
    by_overlap = tl.load(of_class, mask=k < K, other=0.0)[None, :]
    slope = tl.load(of_class + B * K, mask=k < K, other=0.0)[None, :]
    slope = slope + tl.where(is_class, by_overlap, 0.0)
    ce_scale = tl.load(of_class + 2 * B * K, mask=k < K, other=0.0)[None, :]
    target = is_class.to(tl.float32)
    if REGIONS:
        x = tl.where(mask, x, 0.0)
        probability = tl.sigmoid(x)
        overlap = slope * probability * (1.0 - probability)
        z = tl.where(is_class, x, -x)
        log_q = tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))
        if SMOOTH:
            target = _smooth(is_class, SMOOTHING, 2)
        pull = ce_scale * target
    else:
        log_p = _softmax(x)
        probability = tl.exp(log_p)
        overlap = probability * (slope - tl.sum(probability * slope, 1)[:, None])
        if SMOOTH:
            target = _smooth(is_class, SMOOTHING, K)
        pull = ce_scale * target
        ce_scale = tl.sum(pull, 1)[:, None]
        log_q = tl.sum(tl.where(is_class, log_p, 0.0), 1)[:, None]
    if FOCAL:
        q = tl.exp(log_q)
        rest = 1.0 - q
        ce_scale *= _power(rest, GAMMA - 1.0) * (rest - GAMMA * q * log_q)
        pull = ce_scale * target
    g = overlap + probability * ce_scale - pull
    tl.store(out + at, tl.where(is_counted[:, None], g, 0.0).to(out.dtype.element_ty), mask=mask)
