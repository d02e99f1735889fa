"""Multiclass 3D U-Nets on volumes, for people whose GPU memory runs out."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unet3d.api import evaluate as evaluate
    from unet3d.api import train as train
    from unet3d.evaluation.evaluate import EvaluationResult as EvaluationResult
    from unet3d.memory.any_network import estimate_memory as estimate_memory
    from unet3d.memory.any_step import estimate_step as estimate_step
    from unet3d.model.depthwise import use_fast_depthwise as use_fast_depthwise
    from unet3d.model.unet import UNet3D as UNet3D
    from unet3d.pool.approx_median import ApproxMedianPool3d as ApproxMedianPool3d
    from unet3d.pool.avg import AvgPool3d as AvgPool3d
    from unet3d.pool.max import MaxPool3d as MaxPool3d
    from unet3d.pool.median import MedianPool3d as MedianPool3d
    from unet3d.pool.replace import replace_pooling as replace_pooling
    from unet3d.segmenter import Segmenter as Segmenter
    from unet3d.segmenter import load as load
    from unet3d.training.run_reports import TrainingResult as TrainingResult

__version__ = "0.1.0"

_MODULES = {
    "ApproxMedianPool3d": "unet3d.pool.approx_median",
    "AvgPool3d": "unet3d.pool.avg",
    "EvaluationResult": "unet3d.evaluation.evaluate",
    "MaxPool3d": "unet3d.pool.max",
    "MedianPool3d": "unet3d.pool.median",
    "Segmenter": "unet3d.segmenter",
    "TrainingResult": "unet3d.training.run_reports",
    "UNet3D": "unet3d.model.unet",
    "estimate_memory": "unet3d.memory.any_network",
    "estimate_step": "unet3d.memory.any_step",
    "evaluate": "unet3d.api",
    "load": "unet3d.segmenter",
    "replace_pooling": "unet3d.pool.replace",
    "train": "unet3d.api",
    "use_fast_depthwise": "unet3d.model.depthwise",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    """Import a name when it is used: all of them import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'unet3d' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
