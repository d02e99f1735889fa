"""Find flips that make classes look like each other, as left and right kidney."""

import re
from collections.abc import Collection

OTHER_SIDES = {"left": "right", "right": "left", "l": "r", "r": "l"}
SIDE = re.compile("left|right|(?<![a-z])[lr]|[lr](?![a-z])")


def find_sides(names: Collection[str]) -> tuple[str, str] | None:
    """Return the first two names that differ by their side alone.

    >>> find_sides(["background", "Left-Lateral-Ventricle", "Right-Lateral-Ventricle"])
    ('Left-Lateral-Ventricle', 'Right-Lateral-Ventricle')
    >>> find_sides(["lkidney", "rkidney"]), find_sides(["KidneyL", "KidneyR"])
    (('lkidney', 'rkidney'), ('KidneyL', 'KidneyR'))
    """
    known = {name.lower(): name for name in names}
    for name in known:
        for side in SIDE.finditer(name):
            other = name[: side.start()] + OTHER_SIDES[side[0]] + name[side.end() :]
            if other in known:
                return known[name], known[other]
    return None


def find_mixing_flips(
    names: Collection[str], orientation: str, flip_axes: Collection[int]
) -> tuple[str, list[int]] | None:
    """Describe the flips that mix up the sides of classes; also return the axes without them.

    >>> find_mixing_flips(["L", "R"], "RAS", [0, 1, 2])
    ('flips along x (left-right), which make L look like R', [1, 2])
    """
    sides = find_sides(names)
    axis = next(axis for axis, code in enumerate(orientation) if code in "LR")
    if sides is None or axis not in flip_axes:
        return None
    flips = f"flips along {'xyz'[axis]} (left-right), which make {sides[0]} look like {sides[1]}"
    return flips, [other for other in flip_axes if other != axis]
