import re
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from unet3d.cli.help import READS
from unet3d.cli.main import COMMANDS, main
from unet3d.config.compose import (
    ComposedConfig,
    compose_config,
    get_config_dir,
    list_config_groups,
)
from unet3d.config.settings.data import parse_check

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
def test_the_help_of_every_command_lists_its_own_keys_first(command, capsys):
    assert main([command, "--help"]) == 0
    message = capsys.readouterr().out
    assert COMMANDS[command] in message
    own = set(yaml.safe_load((get_config_dir() / f"{command}.yaml").read_text()))
    own -= {"defaults", "hydra", *list_config_groups()}
    section = message.partition("\nkeys: ")[2].split("\n\n")[0]
    listed = [re.split("[.=]", line)[0].strip() for line in section.splitlines()[1:]]
    assert own <= set(listed)
    if command != "train":
        assert "config groups:" not in message.partition(section)[0]


@pytest.mark.parametrize("command", ["plan", "memory", "suggest", "doctor"])
def test_commands_that_compose_a_run_refer_to_the_help_of_train(command, capsys):
    assert main([command, "--help", "pool=median"]) == 0
    message = capsys.readouterr().out
    assert "every option and key of unet3d train is accepted, too" in message
    groups = " ".join(message.partition("\nconfig groups: ")[2].split())
    assert "pool=median" in groups
    assert all(f"{group}=" in groups for group in list_config_groups())
    assert len(message.splitlines()) < 30


def test_the_help_of_check_lists_all_that_check_reads_and_nothing_else(capsys):
    assert main(["check", "--help"]) == 0
    message = capsys.readouterr().out
    assert "data.patch_size=" in message
    assert "optimizer=" not in message
    assert "optimizer.lr" not in message
    composed = compose_config([], "check")
    read = [*READS["check"], "read_voxels", "workers", "format", "output"]
    config = OmegaConf.masked_copy(composed.config, [key for key in read if key != "experiment"])
    # An unlisted key that it reads would be missing.
    parse_check(ComposedConfig(config=config, composition=composed.composition))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ""),
        ("plan", ""),
        ("compare", "RUN ... "),
        ("predict", "checkpoint=... input=... output=... "),
    ],
)
def test_the_usage_line_has_the_required_keys(command, words, capsys):
    assert main([command, "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"usage: unet3d {command} {words}[key=value ...]"


def test_options_and_keys_are_shown_with_their_comments(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "data=pairs", "optimizer.lr=0.5", "--help"]) == 0
    message = capsys.readouterr().out
    for path in get_config_dir().glob("*/[!_]*.yaml"):
        assert f" {path.parent.name}={path.stem}" in message
    assert "config groups: group=option (* = selected)\n" in message
    assert "* data=pairs" in message
    assert "* model=unet_tiny" in message
    assert "  pool=median" in message
    assert "Exact median" in message
    keys = message.partition("\nkeys: key=value (... = required)\n")[2]
    assert keys.startswith("  data.root=... ")  # required ones first
    lines = {line.split()[0]: line for line in keys.splitlines() if "=" in line}
    assert "in_channels=null" in message
    assert lines["compile=false"].endswith("turns fused blocks off and takes more memory;")
    assert "optimizer.lr=0.5" in lines
    assert "_target_=" not in message


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
    ("word", "hint"),
    [
        ("trian", "'trian'; did you mean train? Commands: "),
        ("--hepl", "'--hepl'; did you mean --help? Commands: "),
        ("xyz", "'xyz'. Com"),
    ],
)
def test_an_unknown_command_is_named_with_the_closest_and_all_commands(word, hint, capsys):
    assert main([word]) == 2
    assert hint in capsys.readouterr().err


def test_help_says_what_zsh_needs(capsys):
    assert main(["memory", "--help"]) == 0
    assert "in zsh, quote words with brackets: '" in capsys.readouterr().out
