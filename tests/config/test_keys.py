"""Keys and their comments are read from the files, and checked before anything is read of them."""

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.compose import Composition, compose_config, get_config_dir, list_options
from unet3d.config.keys import (
    check_config,
    collect_keys,
    find_option_with,
    list_option_help,
    read_keys,
)
from unet3d.errors import UsageError


@pytest.fixture
def user_dir(tmp_path):
    """A user's folder of configs with a network of their own."""
    path = tmp_path / "conf" / "model" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# My network.\ndefaults: [unet_tiny, _self_]\nwidth: 3 # my channels\n")
    return tmp_path / "conf"


def test_a_key_has_its_value_and_the_comment_on_its_line(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# The file.\na: 1 # first\nb: # second\n  c: '#3' # third # and more\n")
    assert read_keys(file) == {
        "a": (1, "first"),
        "b": ({"c": "#3"}, "second"),
        "b.c": ("#3", "third # and more"),
    }
    file.write_text("")
    assert read_keys(file) == {}


def test_comments_of_a_users_option_win_over_those_that_it_extends(user_dir):
    composition = Composition(command="memory", choices={"model": "mine"})
    keys = collect_keys(composition, [get_config_dir(), user_dir])
    assert keys["model.width"] == (3, "my channels")
    assert keys["model.depth"].comment  # of unet_tiny
    assert keys["view"].comment.startswith("what to show: peak, layers")  # of the command
    assert keys["seed"].comment  # of train.yaml, which the command extends


def test_options_are_listed_with_their_first_comment_and_the_selected_one_is_marked(user_dir):
    (user_dir / "model" / "global.yaml").write_text("# @package _global_\n# All.")
    options = dict(list_option_help("model", "mine", [get_config_dir(), user_dir]))
    assert (options["* model=mine"], options["  model=global"]) == ("My network.", "All.")
    assert options["  model=unet_tiny"]
    names = [*dict(list_option_help("data", "", [get_config_dir()])), *list_options("data")]
    assert not [name for name in names if "_base" in name]  # which others extend


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
    check_config(with_values("train", {key: value}), [])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optimizer.lr", "high", "optimizer.lr must be a number, as in optimizer.lr=0.003, got"),
        ("model.width", True, "model.width must be a number, as in model.width=8, got True"),
        ("loss.voxel_loss", {"a": 1}, "loss.voxel_loss must be text, as in loss.voxel_loss=ce"),
        ("optimizer", 3, "optimizer must be a mapping of keys, got 3"),
        ("data.patch", [8, 8, 8], "no key 'data.patch'; did you mean patch_size?"),
        ("presicion", 16, "no key or group 'presicion'; did you mean precision?"),
    ],
)
def test_a_value_of_another_type_or_an_unknown_key_is_refused(key, value, expected):
    with pytest.raises(UsageError) as caught:
        check_config(with_values("train", {key: value}), [])
    assert str(caught.value).startswith(expected)


def test_a_class_may_be_added_below_a_group_of_several():
    summary = {"_target_": "lightning.pytorch.callbacks.ModelSummary", "max_depth": 2}
    check_config(with_values("train", {"callbacks.summary": summary}), [])
    with pytest.raises(UsageError, match=r"no key 'callbacks\.summary'"):
        check_config(with_values("train", {"callbacks.summary": {"max_depth": 2}}), [])


def test_types_are_those_of_the_selected_option():
    composed = compose_config(["model=dynunet", "model.filters=[8,16,16]"], "train")
    check_config(composed, [])
    composed.config.model.filters = 8
    with pytest.raises(UsageError, match=r"model\.filters must be a list, as in"):
        check_config(composed, [])


def test_a_command_that_reads_no_dataset_needs_no_data_root():
    check_config(compose_config(["data=nnunet"], "memory"), [])


def test_the_option_that_has_a_key_is_found():
    assert find_option_with("callbacks.early_stopping.patience") == "callbacks=early_stopping"
    assert find_option_with("seed") is None
