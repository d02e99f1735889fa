"""Model the time of the configured training step on a GPU."""

from unet3d.config.settings.training import TrainingSettings
from unet3d.gpu_specs import GpuSpec
from unet3d.machine.device import Precision
from unet3d.roofline.operations import count_operations
from unet3d.roofline.step_time import StepTimeModel, model_step_time
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.memory.training_step import make_step_factory


def model_training_time(settings: TrainingSettings, gpu: GpuSpec) -> StepTimeModel:
    """Count the operations of a step, and model what they take the GPU and the host."""
    precision = Precision(settings.precision, settings.precision)
    settings = resolve_strategy(settings, precision, cuda=True)
    operations = count_operations(make_step_factory(settings, precision, cuda=True))
    return model_step_time(operations, gpu, tf32=settings.tf32)
