"""Find NiiVue, a 3D viewer in JavaScript, in the package ipyniivue.

The script of that package is a widget for notebooks, and exports nothing else. But it carries
NiiVue's own module as a string, percent-encoded, to write it into HTML files (`save_html`). Read in
ipyniivue 2.4.4, which has NiiVue 0.65.
"""

import base64
import gzip
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import distribution as find_distribution
from pathlib import Path
from urllib.parse import unquote

WIDGET = "ipyniivue/static/widget.js"

START_OF_EXPORTS = "export%7B"


@dataclass(frozen=True, kw_only=True)
class NiivueModule:
    """A JavaScript module that exports `Niivue`."""

    packed: str  # gzip, in base64
    license: str


@cache
def find_niivue() -> NiivueModule | None:
    """Return NiiVue's module, or None without ipyniivue or with one that has no such module."""
    try:
        distribution = find_distribution("ipyniivue")
        widget = Path(str(distribution.locate_file(WIDGET))).read_text("utf-8")
    except (PackageNotFoundError, OSError):
        return None
    module = extract_module(widget)
    if module is None:
        return None
    packed = gzip.compress(module.encode(), 9, mtime=0)
    text = distribution.read_text("licenses/LICENSE") or distribution.read_text("LICENSE")
    return NiivueModule(
        packed=base64.b64encode(packed).decode("ascii"), license=text or "BSD-2-Clause"
    )


def extract_module(widget: str) -> str | None:
    """Return the encoded module within a script; None if it has none that exports Niivue.

    >>> extract_module('var a="b",c="var%20n%3B%20export%7BNiivue%7D%3B";')
    'var n; export{Niivue};'
    >>> extract_module("export{x as default}")
    """
    exports = widget.rfind(START_OF_EXPORTS)
    start, stop = widget.rfind('"', 0, exports) + 1, widget.find('"', exports)
    if exports < 0 or start == 0 or stop < 0 or "Niivue" not in widget[exports:stop]:
        return None
    return unquote(widget[start:stop])
