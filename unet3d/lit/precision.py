"""Pure half precision that really trains."""

from lightning.pytorch.plugins.precision import HalfPrecision
from torch.nn import Module

from unet3d.model.half_precision import cast_to_half


class TrueHalfPrecision(HalfPrecision):
    """Weights and activations in half; batch and instance norms stay in float32."""

    def convert_module(self, module: Module) -> Module:
        return cast_to_half(module, self._desired_input_dtype)
