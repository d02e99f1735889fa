"""Segment scans from Python: arrays, files and folders."""

import warnings
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unet3d.commands.export import export
from unet3d.config.fields import DEVICE_KIND, PRECISION, OptionType
from unet3d.config.names import announce
from unet3d.data.checks import is_valid_affine
from unet3d.data.formats.volumes import SUFFIX_LIST, split_suffix, to_label_values
from unet3d.data.layouts.scans import ScanFiles, describe_ignored, find_scans
from unet3d.errors import RunError, UsageError, summarize_error
from unet3d.inference import options
from unet3d.inference.ensemble import load_ensemble
from unet3d.inference.predictor import Predictor
from unet3d.inference.scans import find_pending, plan_outputs, segment_scans
from unet3d.inference.tasks import ScanTask
from unet3d.text import describe_classes, join_first, pluralize

PathLike = str | Path


class Segmenter:
    """Trained networks with their preprocessing and postprocessing; :func:`load` makes one.

    A scan is segmented by overlapping windows, within the memory that is free: see ``memory_gib``
    of :func:`load`.
    """

    def __init__(
        self, predictor: Predictor, checkpoints: Sequence[Path], allow_targets: Sequence[str]
    ):
        self._predictor, self._checkpoints = predictor, checkpoints
        self._allow_targets = allow_targets

    def __repr__(self) -> str:
        return (
            f"Segmenter: {self._predictor.ensemble} on {self._predictor.device}; "
            f"channels {', '.join(self.channels)}; {describe_classes(self.classes)}"
        )

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the names of the channels that an image must have."""
        return self._predictor.ensemble.channels

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the labels 0, 1, 2, ..."""
        return self._predictor.ensemble.classes

    def predict(
        self,
        image: np.ndarray,
        *,
        spacing_mm: float | Sequence[float] | None = None,
        affine: np.ndarray | None = None,
    ) -> np.ndarray:
        """Segment an image that is in memory.

        Args:
            image: ``(D, H, W)``, or ``(C, D, H, W)``, as a NIfTI file holds them.
            spacing_mm: voxel spacing along D, H and W, or one number for all, if the axes point
                right, forward and up.
            affine: ``(4, 4)`` matrix from voxels to mm, as of nibabel, instead of ``spacing_mm``.

        Returns:
            Labels ``(D, H, W)``, uint8 or uint16, with the values of the training labels.
        """
        array = np.asarray(image)
        channels = array[None] if array.ndim == 3 else array
        if channels.ndim != 4 or not channels.size:
            raise UsageError(f"an image is (D, H, W) or (C, D, H, W), got {list(array.shape)}")
        if (spacing_mm is None) == (affine is None):
            raise UsageError("predict needs spacing_mm or affine, one of them")
        if spacing_mm is not None:
            given: Any = spacing_mm
            spacing: list[Any] = [given] * 3 if isinstance(given, Real) else list(given)
            if len(spacing) != 3 or not all(0 < mm < np.inf for mm in spacing):
                raise UsageError(f"spacing_mm must be three numbers > 0, got {spacing}")
            affine = np.diag([*map(float, spacing), 1.0])
        affine = np.asarray(affine, np.float64)
        if not is_valid_affine(affine):
            raise UsageError(f"affine must be an invertible (4, 4) in mm, got {affine.tolist()}")
        prepared = self._predictor.prepare_array(channels, affine)
        values = self._predictor.ensemble.preprocessing.label_values
        return to_label_values(self._predictor.segment(prepared), values)

    def predict_file(self, image: PathLike | Sequence[PathLike], output: PathLike) -> Path:
        """Segment a scan, and write its labels on the grid of the scan.

        Args:
            image: a volume in any format, or one per channel.
            output: the file to write; its ending is the format.
        """
        files = [image] if isinstance(image, str | Path) else list(image)
        paths = tuple(Path(file).expanduser() for file in files)
        target = Path(output).expanduser()
        if not split_suffix(target)[1]:
            raise UsageError(f"output must end in {SUFFIX_LIST}, got {output}")
        scan = ScanFiles(name=paths[0].name, files=paths)
        task = ScanTask(scan=scan, labels=target, probabilities=None)
        for _, error in segment_scans(self._predictor, [task], prefetch=False):
            raise error
        return target

    def predict_files(
        self, images: PathLike, output: PathLike, *, overwrite: bool = False
    ) -> list[Path]:
        """Segment every scan of a folder, and return the files of labels.

        A scan that cannot be segmented is named by the error that is raised after the last one.

        Args:
            images: folder of scans; several channels are NAME_0000, NAME_0001, ...
            output: folder to write to.
            overwrite: also segment scans that already have their labels there, and replace files
                that were not written by this function.
        """
        source = Path(images).expanduser()
        scans = find_scans(source, self.channels)
        tasks = plan_outputs(scans, source, Path(output).expanduser())
        settings = self._predictor.describe_settings()
        pending, notice = find_pending(tasks, settings, overwrite=overwrite)
        for warning in filter(None, (describe_ignored(source), notice)):
            warnings.warn(warning, stacklevel=2)
        failures = list(segment_scans(self._predictor, pending, prefetch=True))
        if failures:
            reasons = [f"{task.scan.name}: {summarize_error(error)}" for task, error in failures]
            is_usage = all(isinstance(error, UsageError) for _, error in failures)
            raise (UsageError if is_usage else RunError)(
                f"{len(failures)} of {pluralize(len(pending), 'scan')} failed: "
                f"{join_first(reasons)}"
            ) from failures[0][1]
        return [task.labels for task in tasks]

    def save(self, folder: PathLike) -> Path:
        """Save the networks as a bundle, with the preprocessing and postprocessing of training.

        A bundle runs without unet3d, and :func:`load` reads it.

        Args:
            folder: the new folder.
        """
        output = Path(folder).expanduser()
        export(self._checkpoints, output, format="bundle", allow_targets=self._allow_targets)
        return output


def load(
    checkpoint: PathLike | Sequence[PathLike],
    *,
    device: str | torch.device = "auto",
    precision: str | int | None = None,
    overlap: float = 0.5,
    batch_size: int = 1,
    tta: str | bool | Sequence[int] = "auto",
    memory_gib: float | None = None,
    keep_largest_component: Sequence[str] | None = None,
    allow_targets: Sequence[str] = (),
    backend: str = "torch",
    skip_background: float | None = None,
    flip_axes: Sequence[int] | Literal["auto"] | None = "auto",
) -> Segmenter:
    """Load trained networks to segment with.

    Args:
        checkpoint: a checkpoint file, a run folder (its best checkpoint, else the last one), the
            folder of a bundle, or ``hf://OWNER/NAME``, a bundle on Hugging Face's hub; several
            make an ensemble.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or one GPU, such as ``"cuda:1"``.
        precision: ``"32"``, ``"16"``, ``"bf16"``, ``"16-true"`` or ``"bf16-true"``, or Lightning's
            name, such as ``"16-mixed"``; by default that of training.
        overlap: overlap of neighboring windows, as a fraction of their size, in [0, 1).
        batch_size: windows per forward pass.
        tta: test-time augmentation by flips, as in ``unet3d predict``: ``"auto"`` (as
            ``evaluation.tta`` of the training run), ``True`` (along the axes that training
            flipped), ``False``, or a list of some of these axes.
        memory_gib: RAM that a scan may take, besides the networks; all that is free by default.
        keep_largest_component: classes of which only the largest component is kept; as chosen in
            training by default.
        allow_targets: your own packages that the network may use.
        backend: what runs the network: ``"torch"``; on a CPU also ``"onnx"`` or ``"openvino"``.
        skip_background: skip windows without a voxel brighter than this level in [0, 1), between
            percentiles 0.5 (0) and 99.5 (1) of the scan; None computes all windows.
        flip_axes: earlier name of ``tta``; None is ``True``.
    """
    several = [checkpoint] if isinstance(checkpoint, str | Path) else checkpoint
    paths = [Path(path).expanduser() for path in several]
    packages = (allow_targets,) if isinstance(allow_targets, str) else tuple(allow_targets)
    if not paths:
        raise UsageError("load needs a checkpoint or a run folder")

    def parse(kind: OptionType, name: str, value: Any) -> Any:
        return None if value is None else kind.parse(value, name)

    if not isinstance(flip_axes, str):
        announce("flip_axes=", "tta=")
        tta = True if flip_axes is None else flip_axes
    axes = tta if isinstance(tta, str | bool) else list(tta)
    classes = None if keep_largest_component is None else tuple(keep_largest_component)
    settings = options.PredictorConfig(
        overlap=options.OVERLAP.parse(overlap, "overlap"),
        batch_size=options.BATCH_SIZE.parse(batch_size, "batch_size"),
        flip_axes="auto" if axes == "auto" else options.AXES.parse(axes, "tta"),
        precision=parse(PRECISION, "precision", precision),
        device=DEVICE_KIND.parse(str(device), "device"),
        backend=options.BACKEND.parse(backend, "backend"),
        skip_background=parse(options.LEVEL, "skip_background", skip_background),
        region=None,
        memory_bytes=parse(options.MEMORY, "memory_gib", memory_gib),
        keep_largest_component=classes,
        allow_targets=packages,
    )
    ensemble = load_ensemble(paths, packages)
    predictor = options.build_predictor(ensemble, settings, ram=settings.memory_bytes)
    if settings.flip_axes is None and not ensemble.mirroring_axes:
        warnings.warn(f"tta=True: {ensemble.describe_mirroring()}", stacklevel=2)
    return Segmenter(predictor, paths, packages)
