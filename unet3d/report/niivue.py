"""Find NiiVue, a 3D viewer in JavaScript, in the distribution ipyniivue.

The script of that distribution is a widget for notebooks, and exports nothing else. But it carries
NiiVue's own module as a string, percent-encoded, to write it into HTML files (`save_html`). Read in
ipyniivue 2.4.4, which has NiiVue 0.65.
"""

import base64
import gzip
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote


@dataclass(frozen=True, kw_only=True)
class NiivueModule:
    """A JavaScript module that exports `Niivue`."""

    packed: str  # gzip, in base64
    license: str


@cache
def find_niivue() -> NiivueModule | None:
    """Return NiiVue's module, or None without ipyniivue or with one that has no such module."""
    try:
        distribution = metadata.distribution("ipyniivue")
    except metadata.PackageNotFoundError:
        return None
    widget = Path(str(distribution.locate_file("ipyniivue/static/widget.js"))).read_text("utf-8")
    module = re.search(r'"([^"]*export%7B[^"]*Niivue[^"]*)"', widget)
    if module is None:
        return None
    packed = gzip.compress(unquote(module[1]).encode(), 9, mtime=0)
    text = distribution.read_text("licenses/LICENSE") or distribution.read_text("LICENSE")
    return NiivueModule(
        packed=base64.b64encode(packed).decode("ascii"), license=text or "BSD-2-Clause"
    )
