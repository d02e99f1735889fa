"""A viewer of cases for a page: their volumes, NiiVue if it is installed, and our own script.

Without NiiVue, or where a browser has no WebGL 2, the script draws slices on a canvas.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.report.html.elements import Html, embed_json, fold, join, tag
from unet3d.report.html.niivue import NiivueModule, find_niivue
from unet3d.report.html.volumes import CaseVolumes, PackedVolumes, pack_within, to_base64
from unet3d.text import join_first

SCRIPT = Path(__file__).with_name("viewer.js")


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """What a page has to hold to show cases."""

    markup: Html
    script: str


def embed_viewer(cases: Iterable[CaseVolumes], count: int, budget: int) -> Viewer | None:
    """Return a viewer of the first cases of `count` that fit into `budget` bytes; None if none do.

    Cases are read one at a time, so that only one is in memory.
    """
    niivue = find_niivue()
    script = read_script()
    budget -= len(script) + (0 if niivue is None else len(niivue.packed) + len(niivue.license))
    budget -= 2000 * (count + 1)  # for facts and markup
    facts: list[dict[str, Any]] = []
    data: list[Html] = []
    left_out: list[str] = []
    for number, case in enumerate(cases):
        packed = pack_within(case, budget // (count - number))
        if packed is None:
            left_out.append(case.name)
            continue
        budget -= packed.size
        facts.append(describe_case(packed, f"v{number}-", "id"))
        data += [
            embed_text(to_base64(volume), f"v{number}-{n}") for n, volume in list_volumes(packed)
        ]
    if not facts:
        return None
    note = (
        f"Left out, since the file would exceed 5 MB: {join_first(left_out)}." if left_out else ""
    )
    return Viewer(markup=make_viewer(facts, data, niivue, note), script=script)


def make_viewer(
    facts: Sequence[dict[str, Any]],
    data: Sequence[Html],
    niivue: NiivueModule | None,
    note: str = "",
) -> Html:
    """Return the markup of a viewer, and the data that its script reads."""
    parts: list[object] = [
        tag("div", tag("p", "The viewer needs JavaScript.", class_="empty"), id="viewer"),
        embed_json(list(facts), "viewer-cases"),
        *data,
    ]
    if note:
        parts.append(tag("p", note, class_="note"))
    if niivue is not None:
        parts.append(embed_text(niivue.packed, "niivue"))
        parts.append(fold("The 3D viewer is NiiVue", tag("pre", niivue.license)))
    return join(parts)


def describe_case(packed: PackedVolumes, prefix: str, key: str) -> dict[str, Any]:
    """Return the facts of a case, with where its volumes are: `key` is "id" or "url"."""
    names = dict(list_names(packed))
    return {
        **packed.facts,
        "image": {key: f"{prefix}0"} if packed.image is not None else None,
        "layers": [{"name": name, key: f"{prefix}{n}"} for n, name in names.items() if n],
    }


def list_names(packed: PackedVolumes) -> list[tuple[int, str]]:
    """Return the number and name of each volume; the image is number 0."""
    return [(0, ""), *enumerate(packed.layers, start=1)]


def list_volumes(packed: PackedVolumes) -> list[tuple[int, bytes]]:
    """Return the number and bytes of each volume."""
    image = [] if packed.image is None else [(0, packed.image)]
    return [*image, *enumerate(packed.layers.values(), start=1)]


def embed_text(text: str, id_: str) -> Html:
    """Return a script element with data in base64, which browsers do not run."""
    return Html(f'<script type="text/plain" id="{id_}">{text}</script>')


def read_script() -> str:
    """Return the script of the viewer."""
    return SCRIPT.read_text("utf-8")
