"""What `import unet3d` offers: names and signatures, which other people's code relies on."""

import inspect
import subprocess
import sys

import pytest

import unet3d

SIGNATURES = {
    "ApproxMedianPool3d": "(kernel_size, stride=None, padding=0, *, tau=0.1)",
    "AvgPool3d": "(kernel_size, stride=None, padding=0)",
    "MaxPool3d": "(kernel_size, stride=None, padding=0)",
    "MedianPool3d": "(kernel_size, stride=None, padding=0)",
    "EvaluationResult": "(*, mean, per_class, cases, errors, content, files)",
    "Segmenter": "(predictor, checkpoints, allow_targets)",
    "TrainingResult": "(*, folder, checkpoint, metrics, report)",
    "UNet3D": "(*, in_channels, num_classes, channels=None, depth=4, width=32, max_width=320, "
    "decoder_channels='same', convs_per_level=2, halve_first_conv=False, residual_blocks=None, "
    "stochastic_depth=0.0, kernel_size=3, pool_kernel=2, norm='batch', activation='relu', "
    "negative_slope=0.01, upsampling='trilinear', deep_supervision=False, pool='max', "
    "fused=True)",
    "estimate_memory": "(model, input_shape, *, loss=None, optimizer=<AdamW>, precision='32', "
    "device='cuda')",
    "evaluate": "(predictions, references, *, checkpoint=None, output=None, images=None, "
    "classes=None, regions=None, annotated=None, group_by=None, ignore_label=None, "
    "tolerance_mm=1.0, metrics=(), missing_predictions='error', draw_worst=5, workers=1, "
    "allow_targets=())",
    "load": "(checkpoint, *, device='auto', precision=None, overlap=0.5, batch_size=1, "
    "flip_axes=(), memory_gib=None, keep_largest_component=None, allow_targets=(), "
    "backend='torch', skip_background=None)",
    "replace_pooling": "(model, pool=None)",
    "train": "(overrides=(), *, folder=None, config_dir=None, log=<lambda>)",
}


def describe(target):
    """Return a signature without types."""
    parameters = []
    for parameter in inspect.signature(target).parameters.values():
        default = parameter.default
        is_named = inspect.isclass(default) or inspect.isfunction(default)
        if is_named and default is not parameter.empty:
            text = f"{parameter.name}=<{default.__name__.strip('<>')}>"
        else:
            text = str(parameter.replace(annotation=parameter.empty))
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(text)
    return f"({', '.join(parameters)})"


METHODS = {
    "predict": "(self, image, *, spacing_mm=None, affine=None)",
    "predict_file": "(self, image, output)",
    "predict_files": "(self, images, output, *, overwrite=False)",
    "save": "(self, folder)",
}


def test_the_methods_of_a_segmenter_are_stable():
    assert {name: describe(getattr(unet3d.Segmenter, name)) for name in METHODS} == METHODS
    public = {name for name in vars(unet3d.Segmenter) if not name.startswith("_")}
    assert public == METHODS.keys() | {"channels", "classes"}


def test_the_names_and_signatures_are_stable():
    assert sorted(unet3d.__all__) == sorted(SIGNATURES)
    assert {name: describe(getattr(unet3d, name)) for name in SIGNATURES} == SIGNATURES


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_is_documented(name):
    assert len(inspect.getdoc(getattr(unet3d, name)).splitlines()[0]) > 20
    assert name in dir(unet3d)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'unet3d' has no attribute 'nothing'"):
        _ = unet3d.nothing


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, unet3d; print(len({'torch', 'numpy', 'lightning', 'hydra'} & {*sys.modules}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n"
