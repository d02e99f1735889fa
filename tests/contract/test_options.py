"""Every option of every group in conf/ works: one that is added is tried without a line here."""

import json
from itertools import cycle, islice
from pathlib import Path

import pytest
import yaml

from tests.contract.helpers.datasets import write_decathlon, write_nnunet, write_pairs

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[2] / "conf"

COMPOSED_ONLY = {
    "logger=mlflow": "needs a package and a database",
    "logger=wandb": "needs a package, and starts a service",
    "trainer=ddp": "starts a process for each GPU or core",
    "trainer=slurm": "runs inside of srun",
    "trainer=torchrun": "runs inside of torchrun",
}
"""Options that a short run in this process cannot try, and why."""

DATASETS = {"decathlon": write_decathlon, "nnunet": write_nnunet, "pairs": write_pairs}
"""Options of data that read files, and what writes them."""

PARAMETERS = {
    "attention_unet": 355_349,
    "basic_unet": 5_746_437,
    "dynunet": 338_949,
    "mednext": 5_551_013,
    "mednext_b": 10_510_949,
    "mednext_l": 61_726_853,
    "mednext_m": 17_533_605,
    "mednext_s": 5_551_013,
    "plain_large": 40_158_853,
    "plain_small": 14_496_517,
    "segresnet": 1_176_213,
    "segresnet_ds": 4_980_975,
    "swin_unetr": 15_703_079,
    "unet_cicek2016": 19_073_029,
    "unet_large": 40_158_853,
    "unet_nnunet": 16_547_759,
    "unet_resenc": 102_350_580,
    "unet_small": 14_496_517,
    "unet_tiny": 88_869,
    "unetr": 92_642_581,
}
"""Parameters at one channel and five classes, as conf/ and documents count them."""

SIZES = {"swin_unetr": 64, "unet_resenc": 64}
"""Voxels per axis of the smallest patch of networks that need more than 32."""


def list_options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def list_groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def combine_options() -> list[tuple[str, ...]]:
    """Return overrides of runs: run k takes option k of every group, over and over."""
    groups = {
        group: [
            f"{group}={option}"
            for option in list_options(group)
            if f"{group}={option}" not in COMPOSED_ONLY
        ]
        for group in list_groups()
        if group not in ("experiment", "model")
    }
    rounds = max(map(len, groups.values()))
    return list(zip(*(islice(cycle(options), rounds) for options in groups.values()), strict=True))


@pytest.fixture(scope="session")
def data_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the overrides of each option of data that reads files."""
    folder = tmp_path_factory.mktemp("datasets")
    names = [f"case_{number}" for number in range(5)]
    found = {
        option: [f"data.root={write(folder / option, names)}", f"data.cache={folder / 'cache'}"]
        for option, write in DATASETS.items()
    }
    found["pairs"].append("data.num_classes=3")
    return found


@pytest.mark.parametrize("options", combine_options(), ids=" ".join)
def test_every_option_takes_a_training_step(unet3d, small, data_of, options, tmp_path):
    (data,) = [option.partition("=")[2] for option in options if option.startswith("data=")]
    base = small
    if data in data_of:
        base = [word for word in small if ".layout" not in word]
        base = [word for word in base if not word.startswith(("data.root", "data.cache"))]
    ended = unet3d("train", *options, *base, *data_of.get(data, []), "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["finished"], report["steps"]) == (True, 1)


def test_options_that_a_short_run_cannot_try_compose(unet3d):
    groups: dict[str, list[str]] = {}
    for group, _, option in (override.partition("=") for override in COMPOSED_ONLY):
        groups.setdefault(group, []).append(option)
    loggers = f"logger=[{','.join(groups.pop('logger'))}]"
    for trainer in groups.pop("trainer"):
        ended = unet3d("train", loggers, f"trainer={trainer}", "--cfg", "job")
        assert ended.code == 0, ended.err
    assert not groups, "options of another group, which nothing composes"


@pytest.mark.parametrize("model", list_options("model"))
def test_every_network_has_its_parameters_and_is_estimated(unet3d, model, tmp_path):
    words = [f"data.patch_size=[{','.join(3 * [str(SIZES.get(model, 32))])}]", "data.batch_size=1"]
    # Without settings that would need less memory: `memory` would estimate each of them, too.
    words += ["precision=bf16", *(["checkpointing=leanest"] if model.startswith("unet_") else [])]
    words += ["data.num_classes=5", "format=json", "output=memory.json"]
    ended = unet3d("memory", f"model={model}", *words)
    assert ended.code == 0, ended.err
    estimate = json.loads((tmp_path / "memory.json").read_text())
    assert estimate["parameters"] == PARAMETERS.get(model, estimate["parameters"])
    assert estimate["peak_allocated_bytes"] > 4 * estimate["parameters"]


def list_values(config: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Return the values of a nested dict by their path."""
    if not isinstance(config, dict):
        return {path: config}
    return {
        inner: value
        for key, below in config.items()
        for inner, value in list_values(below, (*path, key)).items()
    }


@pytest.mark.parametrize("experiment", list_options("experiment"))
def test_every_preset_composes_with_all_of_its_values(unet3d, experiment):
    ended = unet3d("train", f"experiment={experiment}", "--cfg", "job")
    assert ended.code == 0, ended.err
    composed = list_values(yaml.safe_load(ended.out))
    preset = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text()) or {}
    preset.pop("defaults", None)
    assert list_values(preset).items() <= composed.items() if preset else composed


def test_the_command_line_wins_over_a_preset_and_the_preset_over_defaults(unet3d):
    ended = unet3d("train", "experiment=example_small", "precision=bf16", "--cfg", "job")
    config = yaml.safe_load(ended.out)
    assert config["precision"] == "bf16"
    assert config["data"]["patch_size"] == [320, 150, 26]


MINE = "defaults: [unet_tiny, _self_]\nwidth: 3\n"


def test_a_conf_folder_in_the_working_folder_adds_options(unet3d, small, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(MINE)
    ended = unet3d("train", *small, "model=mine", "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["model"]["width"] == 3


def test_config_dir_adds_the_options_of_a_folder(unet3d, tmp_path):
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    (tmp_path / "elsewhere" / "model" / "mine.yaml").write_text(MINE)
    ended = unet3d("train", "--config-dir", tmp_path / "elsewhere", "model=mine", "--cfg", "job")
    assert ended.code == 0, ended.err
    assert yaml.safe_load(ended.out)["model"]["width"] == 3


POOL = """
import torch

class Corner(torch.nn.Module):
    by_window = True

    def __init__(self, kernel_size=2):
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x):
        return torch.nn.functional.interpolate(x, scale_factor=0.5)
"""


def test_a_class_of_the_user_is_built_from_an_option_of_theirs(
    unet3d, small, tmp_path, monkeypatch
):
    (tmp_path / "conf" / "pool").mkdir(parents=True)
    option = "_target_: contract_pool.Corner\n_partial_: true\n"
    (tmp_path / "conf" / "pool" / "corner.yaml").write_text(option)
    (tmp_path / "contract_pool.py").write_text(POOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = unet3d("train", *small, "pool=corner")
    assert ended.code == 0, ended.err
