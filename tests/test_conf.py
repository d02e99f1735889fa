"""Every option of every group composes, builds and takes one training step."""

import pytest

from unet3d.config.compose import get_config_dir
from unet3d.workflows.training.build import build_training

CONF = get_config_dir()
SHRUNK = {  # real networks are too large for a test: the same shape, narrower
    "unet_small": ["model.width=4"],
    "unet_large": ["model.width=4"],
    "unet_cicek2016": ["model.width=4"],
    "unet_nnunet": ["model.width=4", "model.depth=4"],
    "naive_small": ["model.encoder=[4,8,8]", "model.decoder=[8,4]"],
    "naive_large": ["model.encoder=[4,8,8]", "model.decoder=[8,4]"],
    "dynunet": ["model.filters=[4,8,8]"],
}
EXPERIMENTS = [p.stem for p in sorted((CONF / "experiment").glob("*.yaml"))]


def options() -> list[tuple[str, str]]:
    found = []
    for group in sorted(p for p in CONF.iterdir() if p.is_dir()):
        for option in sorted(group.glob("[!_]*.yaml")):
            found.append((group.name, option.stem))
    return found


@pytest.mark.parametrize(("group", "option"), [o for o in options() if o[0] != "experiment"])
def test_every_option_takes_one_training_step(
    composed, small, group, option, tmp_path, data_options
):
    extra = SHRUNK.get(option, [])
    if group == "data" and option in data_options:
        base = [w for w in small if "source" not in w and "data.root" not in w]
        request = composed(f"{group}={option}", *data_options[option], base=base)
    else:
        request = composed(f"{group}={option}", *extra)
    run = build_training(request, tmp_path)
    before = [p.clone() for p in run.task.model.parameters()]
    run.trainer.fit(run.task, run.train_loader, run.val_loader)
    assert run.trainer.global_step == 1
    moved = zip(before, run.task.model.parameters(), strict=True)
    assert any(not a.equal(b) for a, b in moved)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_changes_no_key(composed, experiment):
    request = composed(f"experiment={experiment}", base=[])
    plain = set(composed(base=[]).config)
    assert set(request.config) == plain


def test_a_preset_decides_over_the_defaults(composed):
    config = composed("experiment=forum_small", base=[]).config
    assert config.precision == "16-true"
    assert config.data.patch_size == [320, 150, 26]
    assert config.model.encoder == [64, 128, 256, 256]
    assert composed("experiment=forum_small", "precision=bf16", base=[]).config.precision == "bf16"


@pytest.mark.parametrize("precision", ["32", "16", "bf16", "bf16-true"])
def test_every_precision_that_a_cpu_has_takes_a_step(composed, precision, tmp_path):
    run = build_training(composed(f"precision={precision}"), tmp_path)
    run.trainer.fit(run.task, run.train_loader, run.val_loader)
    assert run.trainer.global_step == 1
