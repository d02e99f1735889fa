"""Log images of the first validation cases: the same cases and slices every time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from unet3d.data.preprocessing.channels import get_plane_names, reorient
from unet3d.errors import UsageError
from unet3d.report.slices import VIEWS, draw_case_slices, find_fullest_slices, get_palette
from unet3d.training.loggers import log_image
from unet3d.types import IGNORE_LABEL, Sample, Triple


class CaseImages(Callback):
    """Log slices of the first `cases` volumes, with reference and prediction.

    `orientation` is the orientation code of the preprocessed volumes, `spacing_mm` their voxel
    spacing by case.
    """

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        orientation: str,
        spacing_mm: Mapping[str, Sequence[float]],
        cases: int = 3,
    ):
        if cases < 0:
            raise UsageError(f"callbacks.case_images.cases must be 0 or more, got {cases}")
        self.spacing_mm, self.cases = spacing_mm, cases
        colors = get_palette(len(class_names) - 1)
        self.legend = list(zip(class_names[1:], colors, strict=True))
        names = get_plane_names(orientation)
        sagittal, coronal, axial = (names.index(view) for view in VIEWS)
        self.axes: Triple = (sagittal, coronal, axial)
        self.flips = [orientation[axis] in "LPI" for axis in self.axes]
        self.slices: dict[str, Triple] = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Sample,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx >= self.cases or trainer.sanity_checking or outputs is None:
            return
        if not (trainer.loggers and trainer.is_global_zero):
            return
        case = batch["case"][0]
        rgb = self.draw(case, batch["image"][0, 0], batch["label"][0], outputs[0])
        for logger in trainer.loggers:
            log_image(logger, f"cases/{case}", rgb, trainer.global_step - 1)

    def draw(self, case: str, image: Tensor, reference: Tensor, prediction: Tensor) -> np.ndarray:
        """Return an RGB image (H, W, 3) of volumes (D, H, W)."""
        image_array, labels, predicted = (
            reorient(volume.cpu().numpy(), self.axes, self.flips)
            for volume in (image.float(), reference, prediction)
        )
        if case not in self.slices:
            self.slices[case] = find_fullest_slices(np.where(labels == IGNORE_LABEL, 0, labels))
        return draw_case_slices(
            image_array,
            {"reference": labels, "prediction": predicted},
            spacing_mm=[self.spacing_mm[case][axis] for axis in self.axes],
            slices=self.slices[case],
            legend=self.legend,
        )
