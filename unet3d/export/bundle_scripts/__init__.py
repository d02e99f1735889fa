"""What the bundle's configs/inference.json names, for `python -m monai.bundle run`."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform
from torch import Tensor, nn

from .predict import FileGrid, Pipeline, convert_to_mm, read_pipeline


def list_scans(folder: str, channels: int) -> list[dict[str, Any]]:
    """List the NIfTI files of a folder; several channels are NAME_0000, NAME_0001, ..."""
    files = [path for path in Path(folder).glob("*") if path.name.endswith((".nii", ".nii.gz"))]
    if channels > 1 and any("_0000.nii" in file.name for file in files):
        first = [str(file) for file in files if "_0000.nii" in file.name]
        numbers = [f"_{n:04d}.nii" for n in range(channels)]
        return [{"image": [f.replace("_0000.nii", n) for n in numbers]} for f in sorted(first)]
    return [{"image": str(file)} for file in sorted(files)]


class ExportedNetworks(nn.Module):
    """The mean logits of the bundle's networks; they compute what they did when exported."""

    def __init__(self, folder: str, device: torch.device):
        super().__init__()
        programs = [torch.export.load(path) for path in sorted(Path(folder).glob("*.pt2"))]
        if torch.device(device).type != "cpu":
            from torch.export.passes import move_to_device_pass

            programs = [move_to_device_pass(program, device) for program in programs]
        self._networks = [program.module() for program in programs]  # have no eval()

    def forward(self, batch: Tensor) -> Tensor:
        """(B, C, D, H, W) -> logits (B, K, D, H, W)."""
        batch = batch.as_tensor() if isinstance(batch, MetaTensor) else batch
        return torch.stack([network(batch) for network in self._networks]).mean(0)


class Preprocessd(MapTransform):
    """Reorient, crop, normalize and resample as in training."""

    def __init__(self, keys: Any, bundle: str):
        super().__init__(keys)
        self.pipeline = Pipeline(read_pipeline(bundle))

    def __call__(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        """Replace images (C, D, H, W) that are channel first."""
        output = dict(data)
        for key in self.key_iterator(output):
            image = output[key]
            affine = convert_to_mm(image.affine.numpy(), image.meta.get("xyzt_units", 0))
            array, grid = self.pipeline.preprocess(image.numpy(), affine)
            meta = dict(image.meta) | {"grid": json.dumps(asdict(grid))}
            output[key] = MetaTensor(torch.from_numpy(array), affine=image.affine, meta=meta)
        return output


class Postprocessd(MapTransform):
    """Turn logits (K, D, H, W) into labels (1, D, H, W) on the grid of the file."""

    def __init__(self, keys: Any, bundle: str, image_key: str = "image"):
        super().__init__(keys)
        self.pipeline, self.image_key = Pipeline(read_pipeline(bundle)), image_key

    def __call__(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        output = dict(data)
        image = output[self.image_key]
        for key in self.key_iterator(output):
            grid = FileGrid(**json.loads(image.meta["grid"]))
            labels = self.pipeline.postprocess(np.asarray(output[key].cpu(), np.float32), grid)
            output[key] = MetaTensor(torch.from_numpy(labels[None]), meta=dict(image.meta))
        return output
