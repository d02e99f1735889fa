"""Run dropout and attention of fake CPU tensors by the operators that CUDA has for them.

A CPU draws a number for each element of dropout, and attention with dropout stores its scores; CUDA
stores a mask of bytes, and no scores. The choice of an operator is that of torch's
sdp_utils.cpp, on a GPU of compute capability 8.0 or more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
VECTOR_BYTES = 16
"""What attention reads at once, along the channels of a head."""
LARGEST_HEAD = 256
"""Channels of a head up to which there is flash attention."""

ATTENTION_BACKWARD = {
    getattr(aten, f"_scaled_dot_product_{n}_attention_backward") for n in ("flash", "efficient")
}
"""Kernels of CUDA that sum gradients of the query, or their products, in float32."""


def drop(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Drop elements, and store which."""
    uses_mask = training and 0 < p < 1 and not inplace
    return aten.native_dropout(input, p, True)[0] if uses_mask else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attend, without storing the scores if a kernel may: (B, heads, L, C) -> (B, heads, L, C')."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    channels, vector = query.shape[-1], VECTOR_BYTES // query.element_size()
    if query.dim() != 4:  # neither device has a kernel for it
        return None
    is_flash = query.dtype in HALF and attn_mask is None and torch.backends.cuda.flash_sdp_enabled()
    if is_flash and channels == value.shape[-1] <= LARGEST_HEAD:
        tensors = [nn.functional.pad(x, (0, -channels % vector)) for x in (query, key, value)]
        scale = channels**-0.5 if scale is None else scale
        flash = aten._scaled_dot_product_flash_attention
        out = flash(*tensors, dropout_p, is_causal, scale=scale)[0]
        return out[..., :channels]
    is_efficient = query.dtype in (torch.float32, *HALF) and not enable_gqa
    is_efficient &= torch.backends.cuda.mem_efficient_sdp_enabled()
    if not is_efficient or channels % vector or value.shape[-1] % vector:
        options = {"scale": scale} | ({"enable_gqa": True} if enable_gqa else {})
        tensors = query, key, value, attn_mask, dropout_p, is_causal
        return aten._scaled_dot_product_attention_math(*tensors, **options)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    stores = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, stores, dropout_p, is_causal, scale=scale)[0]


KERNELS = {"dropout": drop, "scaled_dot_product_attention": attend}
"""By the name in torch.nn.functional, which networks and torch's own layers call."""
FUNCTIONS = {torch.dropout: drop, **{getattr(nn.functional, n): f for n, f in KERNELS.items()}}
"""By the function, which a script may have imported by its name."""


def prefer(kernel: Callable[..., Tensor | None], otherwise: Callable[..., Tensor]) -> Callable:
    """Return a function of fake tensors that uses a kernel where it returns something."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        is_fake = any(isinstance(x, FakeTensor) for x in (*args, *kwargs.values()))
        out = kernel(*args, **kwargs) if is_fake else None
        return otherwise(*args, **kwargs) if out is None else out

    return run
