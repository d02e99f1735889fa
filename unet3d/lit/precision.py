"""Pure half precision that really trains."""

from lightning.pytorch.plugins.precision import HalfPrecision
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase


class PureHalf(HalfPrecision):
    """Weights and activations in half; batch and instance norms stay in float32."""

    def convert_module(self, module: Module) -> Module:
        module = super().convert_module(module)
        for part in module.modules():
            if isinstance(part, _NormBase):
                part.float()
        return module
