"""The frame of a page: head, style, sections, and a policy that allows nothing from elsewhere."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet3d.errors import RunError
from unet3d.files import atomic_write
from unet3d.report.html.elements import Html, join, tag
from unet3d.report.html.viewer import Viewer

MAX_BYTES = 5_000_000
"""Size of a page, so that it can be sent by mail."""

STYLE = Path(__file__).with_name("style.css")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page."""

    title: str | None
    content: Sequence[object]
    id_: str | None = None


def render_page(
    *,
    kind: str,
    title: str,
    subtitle: object,
    sections: Sequence[Section],
    viewer: Viewer | None = None,
    connect: str = "'none'",
    is_wide: bool = False,
) -> str:
    """Return a document; `connect` says what its script may fetch."""
    script = "" if viewer is None else viewer.script
    policy = make_policy(script, connect)
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            tag("title", f"{title} - unet3d"),
            Html(f"<style>{STYLE.read_text('utf-8')}</style>"),
        ]
    )
    header = tag("header", tag("p", kind, class_="kind"), tag("h1", title), tag("p", subtitle))
    parts = [
        tag("section", tag("h2", s.title) if s.title else "", *s.content, id=s.id_)
        for s in sections
    ]
    main = tag("main", header, *parts)
    code = Html(f"<script>{script}</script>") if script else ""
    body = tag("body", main, code, class_="full" if is_wide else None)
    return f'<!doctype html>\n<html lang="en">{tag("head", head)}{body}</html>\n'


def write_html(page: str, path: Path) -> Path:
    """Write a page; refuse one that is too large."""
    size = len(page.encode())
    if size > MAX_BYTES:
        raise RunError(f"it would have {size:,} bytes, more than {MAX_BYTES:,}")
    with atomic_write(path) as draft:
        draft.write_text(page, "utf-8")
    return path


def make_policy(script: str, connect: str) -> str:
    """Return a policy by which only this script runs, and what it makes of the page's data."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' blob:; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def make_cards(facts: Sequence[tuple[str, str, str]]) -> Html:
    """Return the headline: (label, value, remark) of each number."""
    return tag(
        "div",
        *(
            tag(
                "div",
                tag("span", label, class_="label"),
                tag("b", value),
                tag("span", remark, class_="remark"),
                class_="card",
            )
            for label, value, remark in facts
        ),
        class_="cards",
    )


def make_empty(text: str) -> Html:
    """Return what is said where there is nothing to show."""
    return tag("p", text, class_="empty")
