"""Write images of a run as PNG files."""

from pathlib import Path

import numpy as np

from unet3d.files import atomic_write


def write_image(folder: Path, name: str, image: np.ndarray, step: int) -> Path:
    """Write an RGB image (H, W, 3) of bytes to images/NAME/STEP.png; return its path."""
    from PIL import Image

    path = folder / "images" / name / f"{step}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        Image.fromarray(np.ascontiguousarray(image)).save(draft, "png")
    return path
