"""What the autograd engine and its formulas do with tensors that have no values."""

import sys
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

DISPATCH_MODULES = ("unet3d.memory.trace", "torch._compile", "torch._dynamo.eval_frame")
"""Modules whose stack frames lie between torch's and those of __torch_dispatch__."""

FILLING = {
    aten.index_add.default,
    aten.index_fill.int_Scalar,
    aten.index_put.default,
    aten.masked_fill.Scalar,
    aten.put.default,
    aten.scatter.src,
    aten.scatter_add.default,
}
"""Operations by which formulas fill a tensor of their own: in place, unless it is fake."""
FILLED = ("new_zeros", "where", "zeros", "zeros_like")
"""Operations that make such a tensor."""

BCE_NODE = "BinaryCrossEntropyWithLogitsBackward0"
BCE_STEPS = {aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor}
BCE_STARTS = ("add", "sigmoid")
"""How its formula begins, with a tensor that the steps after it change in place."""


ADDING = ("Cholesky", "Linalg", "StdMean", "VarMean")
"""How nodes begin whose formulas add two tensors to a new one."""


WITH_ZEROS, ON_GPU = "as for inputs with zeros", "as on a GPU"
OTHER_FORMULAS = {
    "ProdBackward0": ("torch.prod", WITH_ZEROS),
    "ProdBackward1": ("torch.prod", WITH_ZEROS),
    "CumprodBackward0": ("torch.cumprod", WITH_ZEROS),
    "MaxBackward1": ("torch.max of all values", ON_GPU),
    "MinBackward1": ("torch.min of all values", ON_GPU),
    "MedianBackward0": ("torch.median of all values", ON_GPU),
    "NanmedianBackward0": ("torch.nanmedian of all values", ON_GPU),
    "LinalgMatrixExpBackward0": ("torch.matrix_exp", "without its powers"),
}
"""Nodes whose formulas read values, and choose other steps for tensors that have none."""


def get_sequence_number() -> int:
    """Return the sequence number of autograd's next node."""
    return torch._C._autograd._get_sequence_nr()  # ty: ignore[possibly-missing-submodule]


def find_makers(func: Any) -> tuple[str, ...]:
    """Return the operations whose result the running formula changes in place with this one."""
    if func in FILLING:
        return FILLED
    if func not in BCE_STEPS or torch.is_grad_enabled():
        return ()
    node = torch._C._current_autograd_node()
    return BCE_STARTS if node is not None and node.name() == BCE_NODE else ()


def find_other_formula(node: Any, *, cuda: bool) -> tuple[str, str] | None:
    """Return what a node differentiates and how, where real tensors take other steps."""
    formula = OTHER_FORMULAS.get(node.name())
    return None if formula is None or (cuda and formula[1] == ON_GPU) else formula


def add_bag_numbers(args: tuple) -> tuple:
    """Return arguments of a gradient of bags; it numbers them, unless forward has done so.

    Of fake tensors, it would take the missing numbers for those of no index.
    """
    indices, numbers, is_sparse = args[1], args[3], args[9]
    if not is_sparse or len(numbers):
        return args
    return (*args[:3], indices.new_zeros(len(indices) + 1)[: len(indices)], *args[4:])


def is_called_by_engine() -> bool:
    """Return whether the autograd engine called this operation, with no Python code between."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, *DISPATCH_MODULES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def is_unshared(grad: Tensor, *, tensors: int, storages: int) -> bool:
    """Return whether only the engine references a gradient, besides the dispatch's references."""
    count = grad._use_count()  # ty: ignore[missing-attribute]
    address = grad.untyped_storage()._cdata
    return count <= tensors and torch._C._storage_Use_Count(address) <= storages


def leads_to_modified_view() -> bool:
    """Return whether the running node belongs to a view that was modified in place later."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() != "ViewBackward0":
        return False
    following, _ = node.next_functions[0]
    return following is not None and following.name() == "torch::autograd::CopySlices"


def adds_to_new_tensor(is_own: bool) -> bool:
    """Return whether the running node's formula adds two tensors, of which the first `is_own`.

    In other formulas, it is the engine that adds: a second gradient, in place.
    """
    node: Any = torch._C._current_autograd_node()
    return is_own and node is not None and node.name().startswith(ADDING)
