import subprocess
import sys

import pytest

from unet3d.cli.main import COMMANDS, main
from unet3d.config.compose import compose_config, get_config_dir, list_config_groups

HEAVY = {"torch", "lightning", "monai", "numpy", "matplotlib"}


def imported(*words: str) -> set[str]:
    """Return the modules that a command has imported when it ends."""
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
def test_the_help_of_a_command_and_a_typo_do_not_import_torch(word):
    found = imported("train", word)
    assert "hydra" in found
    assert not HEAVY & found


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_lists_its_keys(command, capsys):
    assert main([command, "--help"]) == 0
    message = capsys.readouterr().out
    assert COMMANDS[command] in message
    for key in compose_config([], command).config:
        assert key in list_config_groups() or f"  {key}" in message, key


def test_options_and_keys_are_shown_with_their_comments(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "data=pairs", "optimizer.lr=0.5", "--help"]) == 0
    message = capsys.readouterr().out
    for path in get_config_dir().glob("*/[!_]*.yaml"):
        assert f" {path.parent.name}={path.stem}" in message
    assert "* data=pairs" in message
    assert "* model=unet_tiny" in message
    assert "  pool=median" in message
    assert "Exact median" in message
    lines = {line.split()[0]: line for line in message.splitlines() if "=" in line}
    assert "in_channels=null" in message
    assert lines["precision=32"].endswith("16-true, bf16-true (pure half)")
    assert "optimizer.lr=0.5" in lines
    assert "_target_=" not in message


def test_required_keys_are_shown_as_dots(capsys):
    assert main(["predict", "-h"]) == 0
    assert "checkpoint=..." in capsys.readouterr().out


def test_options_of_the_user_are_listed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "it's, (odd)" / "conf" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# Mine alone.\ndefaults: [unet_tiny, _self_]\nwidth: 3\n")
    monkeypatch.chdir(folder.parents[1])
    assert main(["train", "--help", "model=mine"]) == 0
    message = capsys.readouterr().out
    assert "* model=mine" in message
    assert "Mine alone." in message
    assert "model.width=3" in message
    assert main(["train", "--help", "model=yours"]) == 2


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "'trian'; did you mean train? Commands: "), ("xyz", "'xyz'. Com")]
)
def test_an_unknown_command_is_named_with_the_closest_and_all_commands(word, hint, capsys):
    assert main([word]) == 2
    assert hint in capsys.readouterr().err
