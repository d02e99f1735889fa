"""Every option of every config group composes, builds and trains for one step."""

import pytest

from tests.config.helpers.configs import SHRUNK
from unet3d.commands.train import build_training
from unet3d.config.compose import list_config_groups, list_options

pytestmark = pytest.mark.slow

OPTIONS = [
    (group, option)
    for group in sorted(list_config_groups())
    if group != "experiment"
    for option in list_options(group)
]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_takes_one_training_step(
    composed, small, group, option, tmp_path, data_options
):
    overrides, base = SHRUNK.get(option, []), small
    if group == "data" and option in data_options:
        overrides = data_options[option]
        base = [word for word in small if "layout" not in word and "data.root" not in word]
    run = build_training(composed(f"{group}={option}", *overrides, base=base), tmp_path)
    before = [p.clone() for p in run.module.model.parameters()]
    run.trainer.fit(run.module, run.data)
    assert run.trainer.global_step == 1
    after = run.module.model.parameters()
    assert any(not a.equal(b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("experiment", list_options("experiment"))
def test_every_experiment_composes_and_adds_no_key(composed, experiment):
    settings = composed(f"experiment={experiment}", base=[])
    assert set(settings.resolved) == set(composed(base=[]).resolved)


def test_an_experiment_wins_over_defaults_and_the_command_line_over_both(composed):
    settings = composed("experiment=forum_small", base=[])
    assert settings.precision == "16-true"
    assert settings.data.patch_size == (320, 150, 26)
    assert settings.network.model.arguments["encoder"] == [64, 128, 256, 256]
    settings = composed("experiment=forum_small", "precision=bf16", base=[])
    assert settings.precision == "bf16"


@pytest.mark.parametrize("precision", ["16", "bf16", "bf16-true"])
def test_every_half_precision_of_a_cpu_takes_a_step(composed, precision, tmp_path):
    run = build_training(composed(f"precision={precision}"), tmp_path)
    run.trainer.fit(run.module, run.data)
    assert run.trainer.global_step == 1
