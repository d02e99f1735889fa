"""True half precision that trains."""

from lightning.pytorch.plugins.precision import HalfPrecision
from torch.nn import Module

from unet3d.model.half_precision import cast_to_half
from unet3d.training.lightning_internals import get_half_dtype


class TrueHalfPrecision(HalfPrecision):
    """Keep weights and activations in half precision; batch and instance norms stay in float32."""

    def convert_module(self, module: Module) -> Module:
        return cast_to_half(module, get_half_dtype(self))
