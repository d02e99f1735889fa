"""Find convolutions that torch does not give to cuDNN, and what they allocate instead.

torch then unfolds the windows of one sample into columns: C_in x kernel rows, and a column for each
output voxel. For a kernel of 3 x 3 x 3 these are 27 times as large as the input.
"""

import re
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from unet3d.errors import UsageError
from unet3d.memory.assumption import Assumption
from unet3d.memory.cudnn import is_channels_last

INT_MAX = 2**31 - 1
"""Elements of a sample up to which 32-bit indices suffice."""

COLUMNS = "convolution: columns"
"""Name of the operation that allocates columns in a trace."""

CUDNN_WITHOUT_CONV3D = range(90_800, 91_500)
"""Versions, from 9.8 to 9.14, that torch does not use for half-precision 3D convolutions."""

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CudnnRules:
    """When torch does not use cuDNN for a convolution, by the versions of both.

    See ConvParams::use_cudnn in torch's aten/src/ATen/native/Convolution.cpp.
    """

    torch: tuple[int, int, int]
    cudnn: int  # 91002 is 9.10.2

    def get_column_bytes(self, x: Tensor, weight: Tensor, out: Tensor, groups: int) -> int:
        """Return the bytes of the columns that a convolution allocates; 0 with cuDNN."""
        if x.dim() < 5 or self._uses_cudnn(x, weight, out):
            return 0
        rows = x.shape[1] // groups * prod(weight.shape[2:])
        return rows * prod(out.shape[2:]) * x.element_size()

    def _uses_cudnn(self, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        has_windows = any(n != 1 for n in weight.shape[2:])
        if x.dtype in HALVES and has_windows:
            if self.torch == (2, 9, 0) and self.cudnn >= CUDNN_WITHOUT_CONV3D.start:
                return False
            is_last = is_channels_last(x) or is_channels_last(weight)
            is_avoided = self.torch >= (2, 9, 1) and self.cudnn in CUDNN_WITHOUT_CONV3D
            if is_avoided and not is_last:
                return False
        if max(x.numel() // len(x), out.numel() // len(out)) > INT_MAX:
            return self.torch >= (2, 6, 0) and self.cudnn >= 90_300
        return True


VERSIONS = Assumption[CudnnRules]("versions")
"""Versions to estimate for instead of the installed ones."""


def get_rules() -> CudnnRules:
    """Return the rules of the assumed versions, or of the installed ones."""
    return VERSIONS.get() or get_installed_rules()


def get_installed_rules() -> CudnnRules:
    """Return the rules of the installed versions; without cuDNN, those of torch with a new one."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return CudnnRules(parse_version(torch.__version__, "torch"), cudnn or 10**6)


def parse_rules(torch_version: str | None, cudnn: str | None) -> CudnnRules:
    """Return the rules of two versions; of those that are None, the installed ones."""
    rules = get_installed_rules()
    if torch_version is not None:
        rules = replace(rules, torch=parse_version(torch_version, "torch"))
    if cudnn is not None:
        major, minor, patch = parse_version(cudnn, "cudnn")
        number = (10_000 if major >= 9 else 1000) * major + 100 * minor + patch
        rules = replace(rules, cudnn=number)
    return rules


def parse_version(text: str, key: str) -> tuple[int, int, int]:
    """Return the first three numbers of a version.

    >>> parse_version("2.9.1+cu128", "torch"), parse_version("9.10", "cudnn")
    ((2, 9, 1), (9, 10, 0))
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise UsageError(f"{key} must be a version such as 2.9.1, got {text!r}")
    major, minor, patch = (int(n or 0) for n in match.groups())
    return major, minor, patch
