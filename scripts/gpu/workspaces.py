"""Rows of the GPU report about memory that cuDNN and cuBLAS take."""

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

from scripts.bench.step import (
    FORUM_SIZE,
    PLAIN,
    Factory,
    build_step,
    list_forum_networks,
    list_peers,
    set_tile_size,
)
from scripts.gpu.kernels import DTYPES
from scripts.gpu.rows import Context, Row
from unet3d.memory.cuda_libraries import CONVOLUTIONS
from unet3d.memory.step.training_step import NullListener, TrainingStep

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
    """Record what convolutions allocate, in layers and in the steps of networks."""
    rows: dict[str, Row] = {}
    for (title, make, size), dtype, last in product(LAYERS, DTYPES, (False, True)):
        if last and len(size) == 3:
            continue  # 1D has no channels-last format
        layout = "channels-last" if last else "contiguous"
        rows[f"{title}, {dtype} {layout}"] = partial(
            record_layer, context, make, size, DTYPES[dtype], last
        )
    networks = {name: list_forum_networks(name, context.width) for name in ("small", "large")}
    for name, strategy in product(networks, (PLAIN, "fused", "lean", "leanest")):
        make_network = networks[name][strategy]
        rows[f"forum {name}, {strategy}"] = partial(record_network, context, make_network)
    large_tiles = set_tile_size(networks["small"]["fused"], 256)
    rows["forum small, fused, 256 MiB"] = partial(record_network, context, large_tiles)
    for precision in ("32", "bf16"):
        rows[f"forum small, {PLAIN}, {precision}"] = partial(
            record_network, context, networks["small"][PLAIN], precision=precision
        )
    dynunet = dict(list_peers([32, 64, 128, 256, 320]))["MONAI DynUNet"]
    rows["MONAI DynUNet"] = partial(record_network, context, dynunet, [96, 96, 96])
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


def record_step(context: Context, step: TrainingStep) -> dict[str, Any]:
    """Record the convolutions of the second step, and what libraries keep after it."""
    step.train(NullListener())
    with AllocationRecorder() as recorder:
        step.train(NullListener())
    row: dict[str, Any] = {"operations": dict(recorder.operations)}
    if context.cuda:
        kept = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        row["cublas_bytes"] = kept - torch.cuda.memory_allocated()
    return row


def record_network(
    context: Context, make: Factory, size: list[int] = FORUM_SIZE, precision: str = "16"
) -> dict[str, Any]:
    """Record a step of a network."""
    return record_step(context, build_step(make, size, 2, precision, context.device.type))
