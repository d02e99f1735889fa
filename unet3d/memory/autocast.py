"""Apply CUDA's autocast rules to CPU tensors, so that a step on fake CPU tensors has GPU dtypes.

The devices cast different operations: CUDA runs every interpolation, group norm, softmax and sum in
float32, a CPU in half precision. CUDA's lists are read from a header in torch's wheel.
"""

import re
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

HALF = (torch.float16, torch.bfloat16)
CPU = torch._C.DispatchKey.AutocastCPU


@cache
def read_operations(macro: str) -> frozenset[str]:
    """Return the operations, with their overloads, that a macro of the header lists."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text("utf-8"))
    assert body is not None
    entries = re.findall(r"_\(([^()]+)\)", body[1])
    return frozenset(".".join(part.strip() for part in entry.split(",")) for entry in entries)


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
    float32 = read_operations("AT_FORALL_FP32")
    float32_unless_chosen = read_operations("AT_FORALL_FP32_SET_OPT_DTYPE")  # by an argument dtype
    widest = read_operations("AT_FORALL_PROMOTE")  # of their arguments' dtypes
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten":
            continue
        if name in float32 or name in widest:
            yield name, _cast_arguments(_get_operation(name), promotes=name in widest)
        elif name in float32_unless_chosen:
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
