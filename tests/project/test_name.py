"""The distribution is unet3d-lightning: `unet3d` on package indexes is another project."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("unet3d", "conf", "docs", "notebooks", "scripts", "container", "data", ".github", ".ci")
TEXT = ("", ".py", ".md", ".yaml", ".ipynb", ".toml", ".txt", ".sh", ".json")

BY_NAME = re.compile(
    r"install [^`\n]*?(?<![\w/.-])[\"']?unet3d(-lightning)?(\[|==|>=|[\"'`)\s]|$)|"
    r"[\"'`]unet3d(-lightning)?\[[a-z{]",
    re.MULTILINE,
)
"""Commands that install the package from an index."""


def test_no_file_tells_anybody_to_install_unet3d_from_an_index():
    folders = [path for name in SHIPPED for path in (ROOT / name).rglob("*")]
    files = [path for path in (*ROOT.iterdir(), *folders) if path.is_file()]
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.suffix in TEXT and path.name != "pyproject.toml" and path.name != ".git"
        for line in path.read_text(errors="replace").splitlines()
        if BY_NAME.search(line)
    ]
    assert not lines, "\n".join(lines)
