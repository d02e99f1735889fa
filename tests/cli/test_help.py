import subprocess
import sys

import pytest

from unet3d.cli.main import COMMANDS, main
from unet3d.config.compose import compose_config, get_config_dir, list_config_groups

HEAVY = {"torch", "lightning", "monai", "numpy", "matplotlib"}


def imported(*words: str) -> set[str]:
    """What a command has imported by its end."""
    code = (
        "import sys; from unet3d.cli.main import main; code = main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    return set(ended.stderr.split())


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_hydra(word):
    assert not (HEAVY | {"hydra", "omegaconf", "yaml"}) & imported(word)


@pytest.mark.parametrize("word", ["--help", "modle=unet_tiny"])
def test_a_verbs_help_and_a_mistyped_word_are_answered_without_torch(word):
    found = imported("train", word)
    assert "hydra" in found
    assert not HEAVY & found


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_of_every_verb_lists_its_keys(verb, capsys):
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert COMMANDS[verb] in said
    for key in compose_config([], verb).config:
        assert key in list_config_groups() or f"  {key}" in said, key


def test_options_and_keys_are_shown_with_what_their_files_say(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "data=pairs", "optimizer.lr=0.5", "--help"]) == 0
    said = capsys.readouterr().out
    for path in get_config_dir().glob("*/[!_]*.yaml"):
        assert f" {path.parent.name}={path.stem}" in said
    assert "* data=pairs" in said
    assert "* model=unet_tiny" in said
    assert "  pool=median" in said
    assert "Exact median" in said
    lines = {line.split()[0]: line for line in said.splitlines() if "=" in line}
    assert "in_channels=null" in said
    assert lines["precision=32"].endswith("16-true, bf16-true (pure half)")
    assert "optimizer.lr=0.5" in lines
    assert "_target_=" not in said


def test_what_must_be_given_is_shown_as_dots(capsys):
    assert main(["predict", "-h"]) == 0
    assert "checkpoint=..." in capsys.readouterr().out


def test_options_of_ones_own_are_listed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "it's, (odd)" / "conf" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# Mine alone.\ndefaults: [unet_tiny, _self_]\nwidth: 3\n")
    monkeypatch.chdir(folder.parents[1])
    assert main(["train", "--help", "model=mine"]) == 0
    said = capsys.readouterr().out
    assert "* model=mine" in said
    assert "Mine alone." in said
    assert "model.width=3" in said
    assert main(["train", "--help", "model=yours"]) == 2
