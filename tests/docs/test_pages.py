"""Pages are complete: links, pictures, files, keys and commands that they name exist."""

import re
from collections import Counter

import pytest

from scripts.docs import update_tables
from scripts.docs.drawing import PICTURES, draw_front
from scripts.docs.gpu_tables import list_errors
from scripts.docs.tables import read_result
from tests.docs.helpers.pages import (
    COMMANDS_OR_FILES,
    DOCUMENTS,
    ROOT,
    inline_code,
    is_module,
    page_name,
    read_anchors,
    read_blocks,
    strip_blocks,
    strip_code,
)
from unet3d.__main__ import COMMANDS
from unet3d.config.compose import get_config_dir, list_config_groups
from unet3d.config.keys import read_keys
from unet3d.text import GIB

CONF = get_config_dir()
GROUPS = set(list_config_groups())
NEW = {"data": {"mine", "cells", "ct"}, "experiment": {"planned", "cells", "ct"}, "hydra": set()}
"""Options that pages tell readers to create."""

SITE = [p for p in DOCUMENTS if page_name(p).startswith("docs/")]
OUTSIDE = ["CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

every_document = pytest.mark.parametrize("page", DOCUMENTS, ids=page_name)


def iter_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", strip_code(page)):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield target, (page.parent / file if file else page), anchor


@every_document
def test_links_lead_somewhere_and_pictures_are_small(page):
    dead = []
    for target, path, anchor in iter_links(page):
        if not path.exists() or (anchor and anchor not in read_anchors(path)):
            dead.append(target)
        elif path.suffix == ".png":
            assert path.stat().st_size < 300_000
    assert dead == []
    assert not [anchor for anchor, count in Counter(read_anchors(page)).items() if count > 1]


@every_document
def test_no_block_is_one_that_no_test_reads(page):
    """A command in a language or an indentation that the reader does not know is not run."""
    fences = re.findall(r"^\s*(?:```|~~~).*$", page.read_text(), re.MULTILINE)
    blocks = read_blocks(page)
    assert len(fences) == 2 * len(blocks)
    assert not [b for b in blocks if not b.file and b.language not in COMMANDS_OR_FILES]
    programs = "(?:unet3d|python|make|pip|torchrun|sbatch|docker) "
    assert not re.findall(rf"^(?:    |\t)\s*\$?\s*{programs}.*$", strip_blocks(page), re.MULTILINE)


@every_document
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    """Otherwise, it is shown as text."""
    tables = re.findall(r"(?:^\|.*\n?)+", strip_blocks(page), re.MULTILINE)
    counts = [{len(re.findall(r"(?<!\\)\|", row)) for row in t.splitlines()} for t in tables]
    assert all(len(numbers) == 1 for numbers in counts)


def is_command(words: list[str]) -> bool:
    """Whether a command in a sentence exists."""
    program, *rest = words
    if program == "unet3d":
        return rest[0] in {*COMMANDS, "--help"} or rest[0].isupper()  # a placeholder
    if program == "make":
        return f"\n{rest[0]}:" in (ROOT / "Makefile").read_text()
    if program == "python" and rest[0] == "-m" and rest[1].startswith("scripts."):
        return is_module(rest[1])
    return program != "python" or rest[0] == "-m" or (ROOT / rest[0]).exists()


@every_document
def test_files_and_commands_in_sentences_exist(page):
    named = re.findall(
        r"`((?:unet3d|scripts|tests|benchmarks|docs|conf)/[\w/.-]+)`", page.read_text()
    )
    examples = re.compile(r"(.*/)?x(\.\w+|/)?|conf/(data/mine|experiment/planned)\.yaml")
    assert not [n for n in named if not examples.fullmatch(n) and not (ROOT / n).exists()]
    programs = ("unet3d", "make", "python")
    found = [code.split() for code in inline_code(page) if code.split()[0] in programs]
    assert not [words for words in found if len(words) > 1 and not is_command(words)]


def known_keys() -> set[str]:
    """All keys of conf/, as typed on the command line."""
    keys = {"key", "group", "stride", "padding"}
    for path in CONF.rglob("*.yaml"):
        group = path.parent.relative_to(CONF).as_posix()
        keys |= {*read_keys(path, "" if group in (".", "experiment") else f"{group}.")}
    return keys


def is_known(word: str, keys: set[str]) -> bool:
    """Whether key=value names a key or an option that exists; words of other kinds do."""
    if re.fullmatch(rf"({'|'.join(GROUPS)})(\.[a-z_]+)+", word):
        return word in keys or word in {"memory.estimate", "data.layout"}
    found = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)*)=(\S*)", word)
    if found is None:
        return True
    key, value = found[1], found[2]
    if key in GROUPS and re.fullmatch(r"[a-z]\w*", value):
        return (CONF / key / f"{value}.yaml").is_file() or value in NEW.get(key, set())
    return key in keys or key in GROUPS or key.startswith("hydra.")


def test_keys_and_options_in_sentences_exist():
    keys = known_keys()
    codes = [(page_name(page), code) for page in DOCUMENTS for code in inline_code(page)]
    words = {(page, word) for page, code in codes if "(" not in code for word in code.split()}
    assert [word for word in sorted(words) if not is_known(word[1].rstrip(",;"), keys)] == []


def test_the_site_and_its_index_have_every_page():
    config = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r": (\S+\.md)$", config.partition("\nnav:\n")[2], re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in SITE] + OUTSIDE
    assert sorted(nav) == sorted(pages)
    index = ROOT / "docs" / "index.md"
    linked = {path.resolve() for _, path, _ in iter_links(index)} | {index}
    outside = [ROOT / name for name in OUTSIDE]
    assert not [path for path in [*SITE, *outside, *NOTEBOOKS] if path not in linked]


def test_every_result_has_the_command_that_recreates_it():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    rows = [re.escape(name) for name in re.findall(r"`(\S+\.json)`", text)]
    rows = [row.replace("<device>", r"[\w.-]+") for row in rows]  # one for all devices
    results = [path.name for path in (ROOT / "benchmarks").glob("*.json")]
    assert not [name for name in results if not any(re.fullmatch(row, name) for row in rows)]


def test_tables_are_those_of_the_result_files():
    for document in update_tables.list_documents():
        text = document.read_text()
        assert update_tables.fill(text) == text, "python -m scripts.docs.update_tables"


def test_all_pages_take_at_most_30000_words():
    pages = (ROOT / "docs").rglob("*.md")  # rules and bars of tables are no words
    assert sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages) <= 30_000


def test_the_front_page_is_short_and_its_figures_are_those_of_the_result_files():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 500
    for name, draw in PICTURES.items():
        assert (ROOT / name).read_text() == draw()
    bars = re.findall(r">([\d,]+ (?:ms|MiB))<", draw_front())
    assert [bar for bar in bars if bar not in text] == []
    preset = read_result("predicted-nnunet")["rows"]["ResEnc L, like AMOS"]["strategies"]
    fused, plain = (preset[s]["peak_reserved_bytes"] / GIB for s in ("fused", "plain modules"))
    assert f"estimated to reserve {fused:.1f} GiB instead of {plain:.1f}." in text
    planned = read_result("cpu-recipes")["hippocampus, 10 minutes"]["planned"]["summary"]
    assert f"mean Dice of {planned['dice']:.3f} after ten minutes" in text
    errors = list_errors()["reserved"]
    assert f"were {-min(errors):.0f}% too low to {max(errors):.0f}% too high" in text
