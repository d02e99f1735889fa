"""Comments of config files become help: the last file that describes a key wins."""

import pytest

from unet3d.config.comments import (
    collect_comments,
    list_option_help,
    list_parent_files,
    parse_comments,
)
from unet3d.config.compose import Composition, get_config_dir


@pytest.fixture
def user_dir(tmp_path):
    """A user's folder of configs with a network of their own."""
    path = tmp_path / "conf" / "model" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# My network.\ndefaults: [unet_tiny, _self_]\nwidth: 3 # my channels\n")
    return tmp_path / "conf"


def test_a_comment_belongs_to_the_key_on_its_line(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        "# The file.\na: 1 # first\nb: # second\n  c: '#3' # third # and more\n  d: '# none'\n"
    )
    assert parse_comments(file) == {"a": "first", "b": "second", "b.c": "third # and more"}
    assert parse_comments(file, "group.")["group.b.c"] == "third # and more"


def test_an_empty_file_has_no_comments(tmp_path):
    (tmp_path / "x.yaml").touch()
    assert parse_comments(tmp_path / "x.yaml") == {}


def test_an_option_follows_the_files_that_it_extends(user_dir):
    files = list(list_parent_files("model", "mine", [get_config_dir(), user_dir]))
    assert [file.stem for file in files] == ["unet_tiny", "mine"]
    assert list(list_parent_files("model", "none_such", [user_dir])) == []


def test_an_option_follows_a_file_of_another_group_that_it_extends(tmp_path):
    for group, text in (("base", "a: 1 # one"), ("model", "defaults: [/base/x, _self_]")):
        (tmp_path / group).mkdir()
        (tmp_path / group / "x.yaml").write_text(text)
    files = list(list_parent_files("model", "x", [tmp_path]))
    assert files == [tmp_path / "base" / "x.yaml", tmp_path / "model" / "x.yaml"]


def test_comments_of_a_users_option_win_over_those_that_it_extends(user_dir):
    composition = Composition(command="memory", choices={"model": "mine"})
    comments = collect_comments(composition, [get_config_dir(), user_dir])
    assert comments["model.width"] == "my channels"
    assert comments["model.depth"]  # of unet_tiny
    assert comments["view"].startswith("what to show: peak, layers")  # of the command
    assert comments["seed"]  # of train.yaml, which the command extends


def test_options_are_listed_with_their_first_comment_and_the_selected_one_is_marked(user_dir):
    options = dict(list_option_help("model", "mine", [get_config_dir(), user_dir]))
    assert options["* model=mine"] == "My network."
    assert options["  model=unet_tiny"]
    assert not [name for name in options if "_base" in name]


def test_a_package_line_is_not_the_comment_of_an_option():
    options = dict(list_option_help("experiment", "none", [get_config_dir()]))
    assert all(options.values())
    assert not [text for text in options.values() if "@package" in text]


def test_an_empty_option_has_no_help(user_dir):
    (user_dir / "model" / "empty.yaml").touch()
    assert ("  model=empty", "") in list_option_help("model", "mine", [user_dir])
