"""Strategies for bytes, texts and values that hardly anybody writes."""

import struct
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 8, 16, 127, 255, 256, 32767, 65535, -32768),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 2**70),
)

FLOATS = (0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 1e30, 1e300, float("nan"), float("inf"), -float("inf"))

TEXTS = (
    *("", " ", "x", "../x", "/etc/passwd", "a/b", ".", "..", "\x1b[2J", "\u202e", "<b>", "%s%n"),
    *("None", "nan", "1e999", "0x10", "-1", "true", "null", "\ud800", "x" * 5000, "\n", "\r", "é"),
    *("=1+1", "os.system", "torch.nn.ReLU", "${seed}", "${oc.env:HOME}", "*", "~", "cuda:99"),
)

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(TEXTS),
    st.integers(-10, 10),
    st.text(max_size=8),
)

VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(max_size=4), st.sampled_from(TEXTS)), inner, max_size=3),
    ),
    max_leaves=6,
)
"""As JSON and YAML hold them."""


@st.composite
def corrupt(draw: st.DrawFn, content: bytes, changes: int = 4) -> bytes:
    """Change bytes at a few places: most of them near an end, where formats have headers."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, changes))):
        size = len(changed)
        ends = st.integers(0, min(size, 400)), st.integers(size - min(size, 400), size)
        where = draw(st.one_of(*ends, st.integers(0, size)))
        kind = draw(st.sampled_from(("flip", "number", "insert", "delete", "cut", "repeat")))
        if kind == "flip" and where < size:
            changed[where] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            width = draw(st.sampled_from("BHIQfd"))
            order = draw(st.sampled_from("<>"))
            changed[where : where + struct.calcsize(width)] = draw(pack(order + width))
        elif kind == "insert":
            changed[where:where] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "delete":
            del changed[where : where + draw(st.integers(1, 64))]
        elif kind == "cut":
            del changed[where:]
        elif kind == "repeat":
            end = where + draw(st.integers(1, 256))
            changed[where:where] = changed[where:end]
    return bytes(changed)


@st.composite
def pack(draw: st.DrawFn, layout: str) -> bytes:
    """Return an odd number in the layout of `struct`."""
    size = 8 * struct.calcsize(layout)
    if layout[-1] in "fd":
        number = draw(st.sampled_from(FLOATS))
        return struct.pack(layout, number if size > 32 or abs(number) < 1e38 else float("inf"))
    return struct.pack(layout, draw(st.sampled_from(NUMBERS)) % 2**size)


@st.composite
def change_lines(draw: st.DrawFn, text: str) -> str:
    """Change lines of `key: value` or `key = value`."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(0, len(lines) - 1)) if lines else 0
        kind = draw(st.sampled_from(("value", "value", "value", "delete", "repeat", "line")))
        if kind == "line" or not lines:
            lines.insert(where, draw(st.one_of(st.text(max_size=40), st.sampled_from(TEXTS))))
        elif kind == "delete":
            del lines[where]
        elif kind == "repeat":
            lines.insert(where, lines[where])
        else:
            line = lines[where]
            at = max(line.find(":"), line.find("="))
            old = line[at + 1 :].split()
            if old and draw(st.booleans()):
                old[draw(st.integers(0, len(old) - 1))] = str(draw(SCALARS))
                value = " ".join(old)
            else:
                value = str(draw(VALUES))
            lines[where] = f"{line[: at + 1]} {value}"
    return "\n".join(lines) + "\n"


@st.composite
def change_value(draw: st.DrawFn, content: Any, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """Replace, remove or add a value at any depth; the content itself is not changed."""
    if isinstance(content, dict | list) and content and draw(st.integers(0, 9)):
        copy = content.copy()
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = draw(st.sampled_from(keys))
        match draw(st.integers(0, 12)):
            case 0:
                del copy[key]
            case 1 if isinstance(copy, dict):
                copy[draw(st.one_of(st.text(max_size=4), st.sampled_from([0, -1, "_target_"])))] = (
                    draw(values)
                )
            case 1 | 2 if isinstance(copy, list):
                copy.insert(key, draw(values))
            case _:
                copy[key] = draw(change_value(copy[key], values))
        return copy
    return draw(values)
