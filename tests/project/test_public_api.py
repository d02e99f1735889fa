"""What `import unet3d` offers, which other people's code relies on."""

import inspect
import subprocess
import sys

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


@pytest.mark.parametrize("name", unet3d.__all__)
def test_a_name_is_documented(name):
    assert len(inspect.getdoc(getattr(unet3d, name)).splitlines()[0]) > 20
    assert name in dir(unet3d)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, unet3d; print(len({'torch', 'numpy', 'lightning', 'hydra'} & {*sys.modules}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n"
