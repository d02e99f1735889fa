"""Generate volumes that are as hard to segment as real ones, for comparing quality.

Eight classes: the background and seven structures with 2.5% to 0.05% of the voxels. Several have
the same intensity, and decoys of that intensity belong to the background, so that a network must
use shape and context:

    body     most of an ellipsoid
    cap      the end of the ellipsoid next to the tube, as bright as the body
    sheet    a bent disc, 1 to 2 voxels thick, at a distance from the body
    sheath   a wall of 1 to 2 voxels around the tube, as bright as the sheet
    tube     as bright as the body; the tube without a sheath, at the body's other end, is a decoy
    nodule   a ball that touches the sheet, as bright as the body; balls elsewhere are decoys
    speck    the smallest structure, inside the body; specks elsewhere are decoys

The first channel shows all of these under noise and a smooth bias field. The second is misleading:
it shows the ellipsoid and blobs without a label, either bright or dark at random.
"""

from collections.abc import Sequence

import numpy as np

from unet3d.data.layouts.synthetic import GeneratedDataset, make_grid

CLASSES = ("background", "body", "cap", "sheet", "sheath", "tube", "nodule", "speck")
INTENSITIES = (0.0, 1.0, 1.0, 1.6, 1.6, 1.0, 1.0, 2.4)  # in the first channel
EXTENT_MM = 48.0  # shortest edge for which the sizes below are chosen


class SyntheticHard(GeneratedDataset):
    """`num_cases` volumes of `size` voxels with two channels and seven structures each.

    `noise` is the standard deviation of the Gaussian noise, `bias` that of the logarithm of the
    first channel's bias field. Structures scale with the volume's shortest edge.
    """

    channels = ("structures", "misleading")

    def __init__(
        self,
        root: str,
        *,
        num_cases: int,
        size: Sequence[int],
        spacing_mm: Sequence[float],
        noise: float,
        bias: float,
        seed: int,
    ):
        settings = {
            "cases": num_cases,
            "size": list(size),
            "spacing_mm": list(map(float, spacing_mm)),
            "noise": float(noise),
            "bias": float(bias),
            "seed": seed,
        }
        super().__init__(root, prefix="hard", classes=CLASSES, settings=settings)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        grid = make_grid(self.settings["size"], self.settings["spacing_mm"])
        label, first, second = draw_case(rng, grid)
        first = first * np.exp(self.settings["bias"] * draw_smooth_field(rng, grid))
        image = np.stack([first, second], axis=-1)
        return image + rng.normal(0, self.settings["noise"], image.shape), label


def draw_case(
    rng: np.random.Generator, grid: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw uint8 labels and both channels without noise, each (D, H, W), on voxels at `grid` mm."""
    extent = grid[:, -1, -1, -1] + grid[:, 0, 0, 0]
    mm = extent.min() / EXTENT_MM
    center = extent * rng.uniform(0.44, 0.56, 3)
    turn, tilt = rng.uniform(0, 2 * np.pi), rng.uniform(-0.6, 0.6)
    # The normal lies in the slice plane: the sheet is thin along the axes with small voxels.
    normal = np.array([np.cos(turn), np.sin(turn), 0.0])
    axis = np.array([-np.sin(turn) * np.cos(tilt), np.cos(turn) * np.cos(tilt), np.sin(tilt)])
    across = np.cross(axis, normal)
    frame = np.stack([axis, normal, across])
    along, sideways, over = np.tensordot(frame, grid - center[:, None, None, None], 1)

    def distance_to(a: float, b: float, c: float) -> np.ndarray:  # in the body's frame
        return np.sqrt((along - a) ** 2 + (sideways - b) ** 2 + (over - c) ** 2)

    length, radius = mm * rng.uniform(15, 18), mm * rng.uniform(8.5, 10)
    ellipsoid = (along / length) ** 2 + (sideways**2 + over**2) / radius**2 < 1
    cut = length * rng.uniform(0.2, 0.35)
    label = np.zeros(grid.shape[1:], np.uint8)
    first = np.zeros(grid.shape[1:])

    def add(mask: np.ndarray, name: str, *, labeled: bool = True) -> None:
        """Give voxels a structure's intensity, and its label unless it is a decoy."""
        first[mask] = INTENSITIES[CLASSES.index(name)]
        label[mask] = CLASSES.index(name) if labeled else 0

    # the sheet and its nodule, and decoys that do not touch the sheet
    gap = radius + mm * rng.uniform(3.5, 5)
    bend = rng.uniform(-0.012, 0.012) / mm
    height = sideways - gap - bend * (along**2 + over**2)
    disc = along**2 + over**2 < (mm * rng.uniform(13, 15)) ** 2
    sheet = (np.abs(height) < 0.85 * mm) & disc
    size = mm * rng.uniform(3.4, 4.0)
    a, c = mm * rng.uniform(-7, 7, 2)
    nodule = distance_to(a, gap + bend * (a**2 + c**2) + size + 0.5 * mm, c) < size
    for c in (-1, 1):
        ball = distance_to(mm * rng.uniform(-8, 8), -radius - mm * rng.uniform(4, 6), c * 18 * mm)
        add(ball < mm * rng.uniform(3.4, 4.0), "nodule", labeled=False)
    for b, c in ((-1, 1), (1, -1)):
        speck = distance_to(mm * rng.uniform(-12, 12), b * 14 * mm, c * mm * rng.uniform(20, 26))
        add(speck < 2.6 * mm, "speck", labeled=False)
    add(nodule, "nodule")
    add(sheet, "sheet")

    # a tube at each end of the body; only one of them has a sheath
    for end, labeled in ((-1, False), (1, True)):
        b, slope = mm * rng.uniform(-3, 3), rng.uniform(-0.4, 0.4)
        core = mm * rng.uniform(2.2, 2.6)
        distance = np.hypot(
            along - end * (length + 3.6 * mm), (sideways - b - slope * over) / np.hypot(1, slope)
        )
        near = np.abs(over) < 14 * mm
        if labeled:
            add((distance < core + 1.6 * mm) & near, "sheath")
        add((distance < core) & near, "tube", labeled=labeled)

    add(ellipsoid, "body")
    add(ellipsoid & (along > cut), "cap")
    spot = distance_to(mm * rng.uniform(-8, 0), mm * rng.uniform(-3, 3), mm * rng.uniform(-3, 3))
    add(spot < mm * rng.uniform(2.6, 2.8), "speck")

    blobs = np.zeros(grid.shape[1:])
    for _ in range(4):
        blob = distance_to(*(mm * rng.uniform(-16, 16, 3)))
        blobs[blob < mm * rng.uniform(5, 8)] = 1.2
    second = rng.choice([-1.0, 1.0]) * (blobs + 0.6 * ellipsoid)
    return label, first, second


def draw_smooth_field(rng: np.random.Generator, grid: np.ndarray) -> np.ndarray:
    """Draw a sum of three long waves with a standard deviation of about 1, (D, H, W)."""
    extent = grid[:, -1, -1, -1]
    total = np.zeros(grid.shape[1:])
    for _ in range(3):
        wave = rng.uniform(-1.2, 1.2, 3) * np.pi / extent
        total += np.cos(np.tensordot(wave, grid, 1) + rng.uniform(0, 2 * np.pi))
    return total * np.sqrt(2 / 3)
