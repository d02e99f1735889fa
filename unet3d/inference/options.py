"""Options of prediction, and the predictor that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from unet3d.config.fields import (
    DEVICE_KIND,
    PRECISION,
    TEXT,
    OptionType,
    integer,
    number,
    one_of,
    one_or_list_of,
    word_or,
)
from unet3d.errors import UsageError
from unet3d.inference.ensemble import Ensemble
from unet3d.inference.networks import resolve_computation
from unet3d.inference.predictor import Predictor
from unet3d.text import GIB


def _are_axes(value: Any) -> bool:
    is_list = isinstance(value, list) and all(type(axis) is int for axis in value)
    return is_list and set(value) <= {0, 1, 2} and len(set(value)) == len(value)


def _is_box(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 6 and all(type(n) is int for n in value)
    return is_list and all(0 <= a < b for a, b in zip(value[::2], value[1::2], strict=True))


OVERLAP, BATCH_SIZE = number(">= 0", "below 1"), integer(">= 1")
LEVEL, BACKEND = number(">= 0", "below 1"), one_of(("torch", "onnx", "openvino"))
AXES = word_or(
    True, word_or(False, OptionType("a list of the axes 0, 1 and 2", _are_axes, tuple), ())
)
AS_TRAINED = word_or("auto", PRECISION, gives_none=False)
ONE_OR_MORE = one_or_list_of(TEXT)
CLASSES = word_or(
    "auto",
    OptionType(
        "none or a list of classes",
        lambda value: value in (None, "none", []) or ONE_OR_MORE.accepts(value),
        lambda value: () if value in (None, "none", []) else ONE_OR_MORE.convert(value),
    ),
)
MEMORY = word_or("auto", replace(number("above 0"), convert=lambda value: int(value * GIB)))
REGION = OptionType(
    "null or a box [x0, x1, y0, y1, z0, z1] in voxels of the file",
    lambda value: value is None or _is_box(value),
    lambda value: None if value is None else tuple(zip(value[::2], value[1::2], strict=True)),
)


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """How networks segment scans; None is auto."""

    overlap: Annotated[float, OVERLAP]  # fraction of a window that its neighbor covers, too
    batch_size: Annotated[int, BATCH_SIZE]  # windows at a time
    # None: those of training; auto: those or none, as training was evaluated
    flip_axes: Annotated[tuple[int, ...] | Literal["auto"] | None, AXES, "tta"]
    precision: Annotated[str | None, AS_TRAINED]  # None: as the first network was trained
    device: Annotated[str, DEVICE_KIND]
    backend: Annotated[str, BACKEND]  # what runs the networks
    skip_background: Annotated[float | None, LEVEL]  # None: skip no window
    region: Annotated[tuple[tuple[int, int], ...] | None, REGION]  # None: all of a scan
    memory_bytes: Annotated[int | None, MEMORY, "memory_gib"]  # RAM of a case; None: what is free
    keep_largest_component: Annotated[tuple[str, ...] | None, CLASSES]  # None: as in training
    allow_targets: tuple[str, ...]


def build_predictor(
    ensemble: Ensemble,
    settings: PredictorConfig,
    *,
    ram: int | None,
    share: tuple[int, int] = (0, 1),
) -> Predictor:
    """Build a predictor; a case may take `ram` bytes, of whose slabs it segments a share."""
    flip_axes = resolve_flip_axes(settings.flip_axes, ensemble)
    device, precision = resolve_computation(
        settings.device, settings.precision, settings.backend, ensemble.precision
    )
    return Predictor(
        ensemble,
        device=device,
        precision=precision,
        overlap=settings.overlap,
        batch_size=settings.batch_size,
        flip_axes=flip_axes,
        keep_largest_component=settings.keep_largest_component,
        ram=ram,
        backend=settings.backend,
        skip_background=settings.skip_background,
        region=settings.region,
        share=share,
    )


def resolve_flip_axes(
    requested: Sequence[int] | Literal["auto"] | None, ensemble: Ensemble
) -> tuple[int, ...]:
    """Return the axes to flip; refuse those that training did not flip."""
    trained = ensemble.mirroring_axes
    if requested == "auto":
        requested = None if ensemble.uses_tta else ()
    if requested is None:
        if trained is None:
            raise UsageError(
                "tta: the checkpoint does not say which axes training flipped: name them, as in "
                "tta=[0,1]"
            )
        return trained
    if trained is not None and not set(requested) <= set(trained):
        flipped = f"only the axes {list(trained)}" if trained else "no axis"
        raise UsageError(
            f"tta={list(requested)}: training flipped {flipped}, and a network segments "
            "wrongly what it has never seen mirrored: leave the other axes out"
        )
    return tuple(requested)
