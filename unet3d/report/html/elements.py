"""Build HTML in which everything that is not markup is escaped."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from unet3d.text import escape_unprintable


class Html(str):
    """Markup; any other string is text."""

    __slots__ = ()


def to_html(value: object) -> Html:
    """Return markup as it is, and anything else as escaped text.

    >>> to_html("<b>"), to_html(Html("<b>"))
    ('&lt;b&gt;', '<b>')
    """
    return value if isinstance(value, Html) else Html(_escape(value))


def join(children: Sequence[object]) -> Html:
    """Return the children one after the other."""
    return Html("".join(map(to_html, children)))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element; attributes that are None are left out, and `_` becomes `-`.

    >>> tag("a", "1 < 2", class_="x", stroke_width=2, id=None)
    '<a class="x" stroke-width="2">1 &lt; 2</a>'
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{_escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Html(f"<{name}{''.join(parts)}>{join(children)}</{name}>")


def embed_json(value: Any, id_: str) -> Html:
    """Return a script element with data: `<` is escaped, since it could end the element."""
    value = _escape_texts(value)
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{id_}">{text}</script>')


def _escape(value: object) -> str:
    return escape(escape_unprintable(str(value), keep="\n\t"))


def _escape_texts(value: Any) -> Any:
    if isinstance(value, str):
        return escape_unprintable(value)
    if isinstance(value, dict):
        return {_escape_texts(key): _escape_texts(item) for key, item in value.items()}
    return [_escape_texts(item) for item in value] if isinstance(value, list | tuple) else value


def make_table(rows: Sequence[Sequence[object]], *, left: int = 1, class_: str = "scroll") -> Html:
    """Return a table whose first row is its header; all but the `left` first columns are right."""

    def make_row(row: Sequence[object], cell: str) -> Html:
        return tag(
            "tr", *(tag(cell, v, class_=None if n < left else "num") for n, v in enumerate(row))
        )

    head, *body = rows
    return tag(
        "div",
        tag(
            "table",
            tag("thead", make_row(head, "th")),
            tag("tbody", *(make_row(row, "td") for row in body)),
        ),
        class_=class_,
    )


def make_pairs(pairs: Sequence[tuple[object, object]]) -> Html:
    """Return names with their values."""
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in pairs))


def fold(summary: str, *children: object) -> Html:
    """Return content that is shown on a click."""
    return tag("details", tag("summary", summary), *children)
