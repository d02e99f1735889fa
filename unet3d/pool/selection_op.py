"""Define the operator of max or median pooling, which select elements of each window."""

from collections.abc import Callable, Sequence

from torch import Tensor

from unet3d.custom_ops import CustomOp
from unet3d.pool.argmax_codes import SelectedIndices, choose_code, encode
from unet3d.pool.kernels import dispatch
from unet3d.pool.layout import allocate_outputs, get_memory_format, is_channels_last
from unet3d.pool.select_backward import make_selection_backward, setup_selection_context
from unet3d.pool.windows import PoolWindows


def define_selection_op(
    pool: str, select: Callable[[Tensor, PoolWindows], tuple[Tensor, SelectedIndices]]
) -> CustomOp:
    """Return unet3d::{pool}_pool3d: the outputs, and the codes of the elements that they select.

    `select` is its reference implementation in plain PyTorch.
    """

    def forward(
        x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        windows = PoolWindows.from_args(size, stride, padding)
        if kernels := dispatch.select_kernels(x):
            return kernels.forward(x, pool, windows)
        y, indices = select(x, windows)
        format = get_memory_format(is_channels_last(x))
        codes = encode(indices, choose_code(pool, windows), windows, x.shape)
        return y.contiguous(memory_format=format), codes.contiguous(memory_format=format)

    def allocate(
        x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return allocate_outputs(x, pool, PoolWindows.from_args(size, stride, padding))

    op = CustomOp(f"unet3d::{pool}_pool3d", forward)
    op.register_fake(allocate)
    op.register_autograd(make_selection_backward(pool), setup_context=setup_selection_context)
    return op
