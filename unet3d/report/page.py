"""Render pages from templates; they load nothing from elsewhere."""

import base64
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from unet3d.text import pluralize

MAX_BYTES = 5_000_000  # size limit of a report, so that it can be sent by mail
PICTURES_SHARE = 0.25  # of these bytes, for pictures of the worst cases; the viewer gets the rest


def render_page(template: str, **content: Any) -> str:
    """Return a document; text in `content` is escaped, except for figures."""
    return ENVIRONMENT.get_template(template).render(content)


def format_score(value: float | None, digits: int = 4) -> str:
    """Return a score, or a dash if there is none; a small one has two significant digits.

    >>> format_score(1.5, 2), format_score(0.00034, 2), format_score(0.0, 2)
    ('1.50', '0.00034', '0.00')
    """
    if value is None or math.isnan(value):
        return "-"
    is_small = 0 < abs(value) < 10.0 ** min(0, 1 - digits)
    return f"{value:.2g}" if is_small else f"{value:.{digits}f}"


def format_mean(score: Mapping[str, float | None] | None, sign: str = "") -> str:
    """Return a mean and its 95% interval, if known, or a dash; `sign` is + for a difference."""
    if score is None or score["mean"] is None or math.isnan(score["mean"]):
        return "-"
    low, high = score.get("low"), score.get("high")
    is_known = low is not None and not math.isnan(low)
    interval = f" [{low:{sign}.4f}, {high:{sign}.4f}]" if is_known else ""
    return f"{score['mean']:{sign}.4f}{interval}"


def embed_pictures(files: Iterable[Path]) -> dict[str, str]:
    """Return PNG files in base64 by name, the first ones that fit into a report."""
    pictures: dict[str, str] = {}
    size = 0
    for file in files:
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        size += len(data)
        if size > PICTURES_SHARE * MAX_BYTES:
            break
        pictures[file.stem] = data
    return pictures


ENVIRONMENT = Environment(
    loader=PackageLoader("unet3d.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"score": format_score, "pluralize": pluralize}
