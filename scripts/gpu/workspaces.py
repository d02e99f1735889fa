"""Rows of the GPU report about memory that cuDNN takes."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.gpu.kernels import DTYPES
from scripts.gpu.rows import Context, Row
from unet3d.memory.cuda_libraries import CONVOLUTIONS

HISTORY = 10_000
"""Events of the allocator that are kept for an operation."""

LAYERS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("3d 1->32", partial(nn.Conv3d, 1, 32, 3, padding=1), (2, 1, 64, 64, 64)),
    ("3d 32->32", partial(nn.Conv3d, 32, 32, 3, padding=1), (2, 32, 64, 64, 64)),
    ("3d 32->32, one sample", partial(nn.Conv3d, 32, 32, 3, padding=1), (1, 32, 64, 64, 64)),
    ("3d 32->64, stride 2", partial(nn.Conv3d, 32, 64, 3, 2, 1), (2, 32, 64, 64, 64)),
    ("3d 64->64", partial(nn.Conv3d, 64, 64, 3, padding=1), (2, 64, 32, 32, 32)),
    ("3d 128->128", partial(nn.Conv3d, 128, 128, 3, padding=1), (2, 128, 16, 16, 16)),
    ("3d 320->320", partial(nn.Conv3d, 320, 320, 3, padding=1), (2, 320, 4, 4, 4)),
    ("3d 3x3x1", partial(nn.Conv3d, 32, 32, (3, 3, 1), padding=(1, 1, 0)), (2, 32, 96, 96, 16)),
    ("3d 1x1x1 64->5", partial(nn.Conv3d, 64, 5, 1), (2, 64, 64, 64, 64)),
    ("3d 4->32", partial(nn.Conv3d, 4, 32, 3, padding=1), (2, 4, 96, 96, 96)),
    ("3d odd", partial(nn.Conv3d, 17, 33, 3, padding=1), (2, 17, 33, 31, 29)),
    ("3d 5x5x5", partial(nn.Conv3d, 32, 32, 5, padding=2), (2, 32, 48, 48, 48)),
    ("3d depthwise 7", partial(nn.Conv3d, 32, 32, 7, 1, 3, groups=32), (2, 32, 32, 32, 32)),
    ("3d transposed", partial(nn.ConvTranspose3d, 64, 32, 2, 2), (2, 64, 32, 32, 32)),
    ("3d transposed, deep", partial(nn.ConvTranspose3d, 320, 256, 2, 2), (2, 320, 4, 4, 4)),
    ("2d 3->64, stride 2", partial(nn.Conv2d, 3, 64, 7, 2, 3), (2, 3, 512, 512)),
    ("2d 64->64", partial(nn.Conv2d, 64, 64, 3, padding=1), (2, 64, 256, 256)),
    ("2d 256->256", partial(nn.Conv2d, 256, 256, 3, padding=1), (2, 256, 64, 64)),
    ("2d 512->512", partial(nn.Conv2d, 512, 512, 3, padding=1), (2, 512, 16, 16)),
    ("1d 64->64", partial(nn.Conv1d, 64, 64, 3, padding=1), (2, 64, 65536)),
]


def workspaces(context: Context) -> dict[str, Row]:
    """Record what convolutions allocate."""
    rows: dict[str, Row] = {}
    for (title, make, size), dtype, last in product(LAYERS, DTYPES, (False, True)):
        if last and len(size) == 3:
            continue  # 1D has no channels-last format
        layout = "channels-last" if last else "contiguous"
        rows[f"{title}, {dtype} {layout}"] = partial(
            record_layer, context, make, size, DTYPES[dtype], last
        )
    return rows


class AllocationRecorder(TorchDispatchMode):
    """Record the allocator's events during each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()  # as JSON, which keeps the results short

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.overloadpacket not in CONVOLUTIONS or not torch.cuda.is_available():
            return func(*args, **(kwargs or {}))
        torch.cuda.memory._record_memory_history(
            "all", context=None, max_entries=HISTORY, clear_history=True
        )
        out = func(*args, **(kwargs or {}))
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        kinds = {"alloc": 1, "free_requested": -1}
        row = {
            "operation": str(func.overloadpacket).removeprefix("aten."),
            "arguments": [describe(x) for x in args],
            "outputs": [describe(x) for x in tree_leaves(out)],
            "events": [e["size"] * kinds[e["action"]] for e in events if e["action"] in kinds],
        }
        self.operations[json.dumps(row)] += 1
        return out


def describe(value: Any) -> Any:
    """Return the shape, strides and dtype of a tensor; other values as they are."""
    if isinstance(value, Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch.")]
    return value


def record_layer(
    context: Context,
    make: Callable[[], nn.Module],
    size: tuple[int, ...],
    dtype: torch.dtype,
    last: bool,
) -> dict[str, Any]:
    """Record forward and backward of a layer."""
    torch.manual_seed(0)
    layer = make().to(context.device, dtype)
    x = torch.randn(size, device=context.device).to(dtype)
    if last:
        format = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
        x = x.contiguous(memory_format=format)
        cast(Any, layer).to(memory_format=format)
    x.requires_grad_()
    with AllocationRecorder() as recorder:
        y = layer(x)
        y.backward(torch.randn_like(y))
    return {"operations": dict(recorder.operations)}
