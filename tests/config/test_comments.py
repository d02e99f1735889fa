"""Comments of config files become help: the last file that describes a key wins."""

import pytest

from unet3d.config.compose import Composition, get_config_dir
from unet3d.config.keys import (
    collect_keys,
    list_option_help,
    list_parent_files,
    read_keys,
)


@pytest.fixture
def user_dir(tmp_path):
    """A user's folder of configs with a network of their own."""
    path = tmp_path / "conf" / "model" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# My network.\ndefaults: [unet_tiny, _self_]\nwidth: 3 # my channels\n")
    return tmp_path / "conf"


def test_a_key_has_its_value_and_the_comment_on_its_line(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        "# The file.\na: 1 # first\nb: # second\n  c: '#3' # third # and more\n  d: '# none'\n"
    )
    assert read_keys(file) == {
        "a": (1, "first"),
        "b": ({"c": "#3", "d": "# none"}, "second"),
        "b.c": ("#3", "third # and more"),
        "b.d": ("# none", ""),
    }
    assert read_keys(file, "group.")["group.a"] == (1, "first")
    file.write_text("")
    assert read_keys(file) == {}


def test_an_option_follows_the_files_that_it_extends(user_dir):
    files = list(list_parent_files("model", "mine", [get_config_dir(), user_dir]))
    assert [file.stem for file in files] == ["unet_tiny", "mine"]
    assert list(list_parent_files("model", "none_such", [user_dir])) == []
    (user_dir / "model" / "other.yaml").write_text("defaults: [/model/mine, _self_]")
    files = list(list_parent_files("model", "other", [user_dir]))
    assert [file.stem for file in files] == ["mine", "other"]


def test_comments_of_a_users_option_win_over_those_that_it_extends(user_dir):
    composition = Composition(command="memory", choices={"model": "mine"})
    keys = collect_keys(composition, [get_config_dir(), user_dir])
    assert keys["model.width"] == (3, "my channels")
    assert keys["model.depth"].comment  # of unet_tiny
    assert keys["view"].comment.startswith("what to show: peak, layers")  # of the command
    assert keys["seed"].comment  # of train.yaml, which the command extends


def test_options_are_listed_with_their_first_comment_and_the_selected_one_is_marked(user_dir):
    options = dict(list_option_help("model", "mine", [get_config_dir(), user_dir]))
    assert options["* model=mine"] == "My network."
    assert options["  model=unet_tiny"]
    (user_dir / "model" / "empty.yaml").touch()
    (user_dir / "model" / "global.yaml").write_text("# @package _global_\n# All.")
    options = dict(list_option_help("model", "mine", [user_dir]))
    assert (options["  model=empty"], options["  model=global"]) == ("", "All.")
    names = dict(list_option_help("data", "", [get_config_dir()]))
    assert not [name for name in names if "_base" in name]
