"""Convert a network to pure half precision."""

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase


def cast_to_half(module: Module, dtype: torch.dtype) -> Module:
    """Convert all parameters and buffers in place, except those of batch and instance norms."""
    for part in module.modules():
        if isinstance(part, _NormBase):
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                cast = parameter.detach().to(dtype)
                part._parameters[name] = Parameter(cast, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module
