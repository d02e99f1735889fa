import pytest

from unet3d.config.compose import Composition, list_config_groups, list_options


@pytest.mark.parametrize(
    ("override", "key", "is_overridden"),
    [
        ("data.patch_size=[8,8,8]", "data.patch_size", True),
        ("data.patch_size=[8,8,8]", "data", True),
        ("data.patch_size=[8,8,8]", "data.patch", False),
        ("+model.foo=1", "model.foo", True),
        ("~model.foo", "model.foo", True),
        ("pool=median", "pool", True),
        ("pool@other=median", "pool", True),
        ("pool=median", "po", False),
    ],
)
def test_an_override_sets_a_key_and_the_groups_above_it(override, key, is_overridden):
    composition = Composition(command="train", choices={}, overrides=(override,))
    assert composition.is_overridden(key) is is_overridden


def test_options_leave_out_what_others_extend():
    assert "model" in list_config_groups()
    assert "unet_tiny" in list_options("model")
    assert not [name for name in list_options("augmentation") if name.startswith("_")]
