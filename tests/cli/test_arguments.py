"""Flags are Hydra's; a mistaken one is answered with how a setting is written."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from unet3d.cli.arguments import check_flags
from unet3d.cli.main import main
from unet3d.config.compose import quote_override
from unet3d.errors import UsageError


@pytest.mark.parametrize(
    "words",
    [
        ["seed=1"],
        ["-m", "seed=1,2"],
        ["--multirun", "seed=1,2"],
        ["--cfg", "job"],
        ["--cfg=job", "--resolve"],
        ["--config-dir", "my configs"],
        ["--info=defaults", "seed=1"],
    ],
)
def test_flags_of_hydra_are_accepted(words):
    check_flags("train", words)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("memory", ["--format", "json"], ", as in format=json (unet3d memory --help lists them)"),
        ("memory", ["--format=json"], ", as in format=json (unet3d memory --help lists them)"),
        ("train", ["--lr", "0.1"], ", as in optimizer.lr=0.1 (unet3d train --help lists them)"),
        ("train", ["--fold", "-m"], ", as in fold=... (unet3d train --help lists them)"),
        ("train", ["--batch-size", "4"], "key=value (unet3d train --help lists them)"),
        ("train", ["--multirn"], "unknown flag --multirn; did you mean --multirun?"),
        ("train", ["--cfg", "no"], "argument --cfg/-c: invalid choice: 'no' "),
        ("train", ["--config-dir"], "argument --config-dir/-cd: expected one argument"),
    ],
)
def test_other_flags_are_refused_with_what_to_write_instead(command, words, message):
    with pytest.raises(UsageError) as refused:
        check_flags(command, words)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "path", ["C:\\scans", "C:\\scans\\", "C:\\it's\\", "\\\\server\\new (1)", "it's, here", "a=b"]
)
def test_paths_of_any_system_reach_the_config_as_typed(path):
    parsed = OverridesParser.create().parse_override(quote_override(f"input={path}", sweep=False))
    assert parsed.value() == path


def test_an_unknown_flag_ends_a_command_with_one_line(capsys):
    assert main(["memory", "--hepl"]) == 2
    assert capsys.readouterr().err == "unet3d: unknown flag --hepl; did you mean --help?\n"


@pytest.mark.parametrize("word", ["trainer=3", "trainer=[[1]]", "--resolve"])
def test_a_word_that_hydra_does_not_expect_ends_a_command_with_one_line(word, capsys):
    assert main(["doctor", word]) == 2
    error = capsys.readouterr().err
    assert error.startswith("unet3d: ")
    assert error.count("\n") == 1
