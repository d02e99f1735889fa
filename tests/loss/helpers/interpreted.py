"""Compare the Triton kernels of the loss, interpreted, with plain PyTorch.

A separate program, run with TRITON_INTERPRET=1: Triton reads that when kernels are defined.
"""

from itertools import product

import torch

from unet3d.loss import dice_terms
from unet3d.loss.kernels import cuda
from unet3d.types import get_ignore_label

SHAPES = [(2, 3, 5, 6, 7), (1, 1, 3, 4, 5), (2, 5, 1, 1, 3), (1, 17, 4, 5, 6)]


def check(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    regions: bool,
    channels_last: bool,
    gamma: float = 0.0,
    smoothing: float = 0.0,
    labels_dtype: torch.dtype = torch.uint8,
) -> None:
    b, k, *space = shape
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    logits = (3 * torch.randn(shape)).to(dtype).contiguous(memory_format=layout)
    labels = torch.randint(0, k, (b, *space)).to(labels_dtype)
    labels[:, 0, 0, :2] = get_ignore_label(labels)
    table = None
    if regions:
        table = dice_terms.make_region_table([[c, (c + 1) % k] for c in range(k)])
    kind = dice_terms.CrossEntropyOptions(gamma=gamma, smoothing=smoothing)
    options = dice_terms.TermOptions(table, kind)
    result = cuda.sum_terms(logits, labels, table, gamma, smoothing)
    expected = dice_terms.sum_terms(logits, labels, options)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(3, b, k)
    result = cuda.compute_gradient(logits, labels, table, grad, gamma, smoothing)
    expected = dice_terms.compute_gradient(logits, labels, grad, options)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def check_nan() -> None:
    """A NaN that is neither of the label's class nor of the foreground still reaches the sums."""
    logits, labels = torch.zeros(1, 3, 2, 2, 2), torch.ones(1, 2, 2, 2, dtype=torch.uint8)
    logits[0, 0, 0, 0, 0] = torch.nan
    assert cuda.sum_terms(logits, labels, None, 0.0, 0.0)[2, 0, 1].isnan()


def main() -> None:
    torch.manual_seed(0)
    cases = list(product(SHAPES, (torch.float32, torch.float16), (False, True), (False, True)))
    focal = product(SHAPES[:3], (torch.float32,), (False, True), (False,), (1.0, 2.5))
    smooth = product(SHAPES, (torch.float32,), (False, True), (False, True), (0.0,), (0.2,))
    for case in (*cases, *focal, *smooth):
        check(*case)
    check((1, 300, 2, 3, 2), torch.float32, False, True, labels_dtype=torch.int16)
    check_nan()


if __name__ == "__main__":
    main()
