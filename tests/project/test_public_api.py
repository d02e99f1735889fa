"""What `import unet3d` offers, which other people's code relies on."""

import inspect

import pytest

import unet3d

DEFAULTS = {
    "UNet3D": "channels=None, depth=4, width=32, max_width=320, decoder_channels='same', "
    "convs_per_level=2, halve_first_conv=False, residual_blocks=None, stochastic_depth=0.0, "
    "kernel_size=3, pool_kernel=2, norm='batch', activation='relu', negative_slope=0.01, "
    "upsampling='trilinear', deep_supervision=False, pool='max', fused=True",
    "evaluate": "checkpoint=None, output=None, images=None, classes=None, regions=None, "
    "annotated=None, group_by=None, ignore_label=None, tolerance_mm=1.0, metrics=(), "
    "missing_predictions='error', draw_worst=5, workers=1, allow_targets=()",
    "load": "device='auto', precision=None, overlap=0.5, batch_size=1, flip_axes=(), "
    "memory_gib=None, keep_largest_component=None, allow_targets=(), backend='torch', "
    "skip_background=None",
}
"""Defaults of options; the contract has the names of all arguments."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_stable(name):
    parameters = inspect.signature(getattr(unet3d, name)).parameters.values()
    options = [p.replace(annotation=p.empty) for p in parameters if p.default is not p.empty]
    assert ", ".join(map(str, options)) == DEFAULTS[name]
