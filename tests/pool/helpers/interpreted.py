"""Compare the Triton kernels, interpreted, with the references.

A separate program, run with TRITON_INTERPRET=1: Triton reads that when kernels are defined.
"""

import torch

from scripts.gpu.kernels import run_kernels
from tests.pool.helpers.volumes import DTYPES, make_volume
from unet3d.pool.kernels import cuda, plain
from unet3d.pool.windows import PoolWindows

CASES = [  # (window, size)
    ((2, None, 0), (4, 4, 6)),
    ((2, None, 0), (5, 3, 7)),
    (((1, 2, 2), None, 0), (2, 5, 4)),
    (((2, 2, 1), None, 0), (3, 4, 5)),
    ((3, 2, 1), (5, 4, 6)),
    ((3, 3, 0), (6, 4, 3)),
    (((3, 2, 2), 2, (1, 1, 0)), (4, 5, 6)),
    (((4, 4, 2), 3, (2, 1, 1)), (4, 5, 4)),
]
KINDS = ["random", "tied", "infinite", "nan", "huge"]


def check(pool: str, x: torch.Tensor, windows: PoolWindows) -> None:
    upper = torch.randn(*x.shape[:2], *windows.output_shape(x.shape)).to(x)
    if not x.is_contiguous():
        upper = upper.contiguous(memory_format=torch.channels_last_3d)
    y, codes, g = run_kernels(cuda, x, upper, pool, windows, 0.3)
    expected, expected_codes, g_expected = run_kernels(plain, x, upper, pool, windows, 0.3)
    eps = torch.finfo(x.dtype).eps  # the interpreter truncates to bfloat16
    tolerance = {"rtol": 2 * eps, "atol": 4 * eps, "equal_nan": True}
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(y, expected, **tolerance)
    torch.testing.assert_close(g, g_expected, **tolerance)


def main() -> None:
    torch.manual_seed(0)
    for number, (window, size) in enumerate(CASES):
        windows = PoolWindows.from_args(*window)
        for index, pool in enumerate(("median", "max", "avg", "approx_median")):
            if pool == "approx_median" and windows.elements > 18:
                continue  # takes seconds in the interpreter
            layouts = (False, True) if number % 4 == 0 else ((number + index) % 2 == 1,)
            for last in layouts:
                n = number + last
                dtype = DTYPES[n % 3]
                kind = KINDS[n % 5] if pool in ("median", "max") else "random"
                channels = 1 if number % 4 == 0 else 3
                x = make_volume((1, channels, *size), kind, dtype)
                if last:
                    x = torch.empty_like(x, memory_format=torch.channels_last_3d).copy_(x)
                check(pool, x, windows)


if __name__ == "__main__":
    main()
