"""Keys and their comments are read from the files, and checked before anything is read of them."""

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.compose import Composition, compose_config, to_yaml_literal
from unet3d.config.keys import (
    check_config,
    collect_keys,
    compose_api_config,
    find_option_with,
)
from unet3d.errors import UsageError


def test_comments_of_a_users_option_win_over_those_that_it_extends(tmp_path):
    (tmp_path / "model").mkdir()
    option = "defaults: [unet_tiny, _self_]\nwidth: 3 # my channels\n"
    (tmp_path / "model" / "mine.yaml").write_text(option)
    composition = Composition(command="memory", choices={"model": "mine"}, config_dirs=(tmp_path,))
    keys = collect_keys(composition)
    assert keys["model.width"] == (3, "my channels")
    assert keys["model.depth"].comment  # of unet_tiny
    assert keys["view"].comment.startswith("what to show: peak, layers")  # of the command
    assert keys["seed"].comment  # of train.yaml, which the command extends


@pytest.mark.parametrize(
    ("override", "key", "is_overridden"),
    [
        ("data.patch_size=[8,8,8]", "data.patch_size", True),
        ("data.patch_size=[8,8,8]", "data", True),
        ("data.patch_size=[8,8,8]", "data.patch", False),
        ("~model.foo", "model.foo", True),
        ("pool@other=median", "pool", True),
    ],
)
def test_an_override_sets_a_key_and_the_groups_above_it(override, key, is_overridden):
    composition = Composition(command="train", choices={}, overrides=(override,))
    assert composition.is_overridden(key) is is_overridden


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.foreground_fraction", 1),  # an int for a float
        ("model.kernel_size", [3, 3, 1]),  # a list for an int
        ("data.num_classes", None),
        ("trainer.devices", "auto"),
        ("optimizer.lr", "${lr}"),  # a reference is checked when it is read
    ],
)
def test_a_value_of_the_right_type_is_accepted(key, value):
    check_config(with_values("train", {key: value}))


def test_a_class_may_be_added_below_a_group_of_several():
    summary = {"_target_": "lightning.pytorch.callbacks.ModelSummary", "max_depth": 2}
    check_config(with_values("train", {"callbacks.summary": summary}))
    with pytest.raises(UsageError, match=r"no key 'callbacks\.summary'"):
        check_config(with_values("train", {"callbacks.summary": {"max_depth": 2}}))


def test_a_command_that_reads_no_dataset_needs_no_data_root():
    check_config(compose_config(["data=nnunet"], "memory"))


def test_the_option_that_has_a_key_is_found():
    assert find_option_with("callbacks.early_stopping.patience") == "callbacks=early_stopping"
    assert find_option_with("seed") is None


@pytest.mark.parametrize("regions", [{"right": [2, 3], "lesion": [3]}, {"new": [1, 2, 3]}])
def test_a_mapping_replaces_that_of_a_file(tmp_path, monkeypatch, regions):
    (tmp_path / "conf" / "data").mkdir(parents=True)
    text = "defaults: [synthetic, _self_]\nregions: {all: [1, 2, 3], right: [2, 3], lesion: [3]}\n"
    (tmp_path / "conf" / "data" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    given = to_yaml_literal(regions)
    composed = compose_api_config("train", ["data=mine", f"data.regions={given}"])
    assert composed.config.data.regions == regions
    composed = compose_api_config("train", ["lr_factors={encoder:0.1}"])
    assert composed.config.lr_factors == {"encoder": 0.1}
