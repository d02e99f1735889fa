"""Apply CUDA's autocast rules to CPU tensors, so that a step on fake CPU tensors has GPU dtypes.

The devices cast different operations: CUDA runs every interpolation, group norm, softmax and sum in
float32, a CPU in half precision. The lists are those of ATen/autocast_mode.h in torch's wheel; a
test compares them.
"""

import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

FP32 = frozenset(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa""".split()
)
"""Operations whose arguments are cast to float32."""

FP32_BY_DTYPE = frozenset(
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
)
"""Operations that compute in float32 unless the caller passes a dtype."""

PROMOTED = frozenset(
    """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
    scatter_add""".split()
)
"""Operations whose arguments are cast to the widest dtype among them."""

HALF = (torch.float16, torch.bfloat16)
CPU = torch._C.DispatchKey.AutocastCPU


@contextmanager
def use_cuda_autocast_rules() -> Generator[None]:
    """Make `torch.autocast("cpu", ...)` cast as on CUDA, within the body."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the overrides
            for name, kernel in _kernels():
                library.impl(name, kernel, "AutocastCPU", allow_override=True)
        yield
    finally:
        library._destroy()


def _kernels() -> Iterator[tuple[str, Any]]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten":
            continue
        if name in FP32 or name in PROMOTED:
            yield name, _cast_arguments(_get_operation(name), promotes=name in PROMOTED)
        elif name in FP32_BY_DTYPE:
            yield name, _run_in_float32(_get_operation(name))
        elif has(full, "AutocastCPU") and not has(full, "AutocastCUDA") and "conv" not in name:
            yield name, torch.library.fallthrough_kernel


def _get_operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast_arguments(operation: Any, *, promotes: bool) -> Any:
    """Cast to float32, or where the operation promotes only if any argument is float32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        dtypes = {t.dtype for t in tensors if t.is_floating_point()}
        is_half = promotes and dtypes and torch.float32 not in dtypes
        dtype = next(iter(dtypes)) if is_half else torch.float32

        def cast(x: Tensor) -> Tensor:
            return x.to(dtype) if x.dtype in HALF else x

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(CPU)):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return kernel


def _run_in_float32(operation: Any) -> Any:
    name = operation.overloadpacket.__name__
    is_softmax = name in ("softmax", "log_softmax")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(CPU)):
            has_dtype = kwargs.get("dtype") is not None
            has_dtype |= is_softmax and len(args) > 2 and args[2] is not None
            if has_dtype or args[0].dtype not in HALF:
                return operation(*args, **kwargs)
            if is_softmax and args[0].dtype == torch.float16:
                # CUDA has a kernel that reads half and writes float32, without a float32 copy.
                fused = getattr(torch.ops.aten, f"_{name}")
                return fused(args[0], args[1] % args[0].dim(), True)
            return operation(*args, **{**kwargs, "dtype": torch.float32})

    return kernel
