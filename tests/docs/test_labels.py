"""The functions of docs/how-to/labels.md for objects that touch."""

from itertools import product

import numpy as np

from tests.docs.helpers.pages import ROOT, read_blocks

BLOCKS = read_blocks(ROOT / "docs" / "how-to" / "labels.md")


def test_objects_that_touch_are_marked_and_split_again():
    functions: dict = {}
    [code] = [block.content for block in BLOCKS if "def mark_borders" in block.content]
    exec(code, functions)
    objects = np.zeros((12, 12, 20), np.int32)
    objects[2:9, 2:9, 2:9] = 7
    objects[2:9, 2:9, 9:16] = 3
    objects[10:, 10:, 17:] = 12
    padded = np.pad(objects, 1)
    touches = np.zeros(objects.shape, bool)
    for z, y, x in product(range(3), repeat=3):
        other = padded[z : z + 12, y : y + 12, x : x + 20]
        touches |= (other > 0) & (other != objects)
    classes = functions["mark_borders"](objects)
    np.testing.assert_array_equal(classes, np.where(objects > 0, 1 + touches, 0))
    assert (classes[4, 4, 8:10] == 2).all()
    found = functions["split_objects"](classes)
    pairs = {(a, b) for a, b in zip(objects.flat, found.flat, strict=True)}
    assert len(pairs) == len({b for _, b in pairs}) == 4
