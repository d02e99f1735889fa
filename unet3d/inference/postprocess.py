"""Only the largest piece of a class is kept, where a patient has just one of it."""

from collections.abc import Sequence

import numpy as np

BYTES = 8
"""What cleaning takes at most for each voxel."""


def keep_largest_component(labels: np.ndarray, classes: Sequence[int]) -> None:
    """Turn all but the largest piece of each class into background, in place.

    Voxels that touch, be it at a corner, are one piece.
    """
    from scipy.ndimage import find_objects, label

    boxes = find_objects(labels)
    for number in classes:
        box = boxes[number - 1] if number <= len(boxes) else None
        if box is None:  # the class is not there
            continue
        part = labels[box]
        mask = part == number
        pieces, count = label(mask, structure=np.ones((3, 3, 3)))
        if count > 1:
            sizes = np.zeros(count + 1, np.int64)
            for row in pieces:  # counted at once, they would be copied to 64 bits
                sizes += np.bincount(row.ravel(), minlength=count + 1)
            mask &= pieces != 1 + np.argmax(sizes[1:])
            part[mask] = 0
