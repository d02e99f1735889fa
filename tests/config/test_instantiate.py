"""A factory is read with the config, and builds later."""

import pytest
from omegaconf import OmegaConf

from unet3d.config.instantiate import Factory, read_factory
from unet3d.errors import UsageError

RELU = {"_target_": "torch.nn.ReLU", "inplace": True}


def make_factory(**arguments):
    return Factory("group", arguments)


def test_reading_builds_nothing():
    config = OmegaConf.create({"group": {"_target_": "torch.nn.Linear", "in_features": -1}})
    factory = read_factory(config, "group")
    assert factory.arguments == {"_target_": "torch.nn.Linear", "in_features": -1}
    with pytest.raises(UsageError):
        factory()
    assert read_factory(OmegaConf.create({"a": {"b": RELU}}), "a.b").key == "a.b"
    with pytest.raises(UsageError, match=r"^group must have a _target_"):
        read_factory(OmegaConf.create({"group": {"lr": 1}}), "group")
    with pytest.raises(UsageError, match=r"^group\._target_: cannot import None"):
        make_factory(lr=1)()


def test_arguments_that_follow_a_key_are_bound_with_it():
    config = OmegaConf.create({"a": {"b": 3}, "group": {**RELU, "x": "${a.b}", "y": "${a.b}1"}})
    factory = read_factory(config, "group")
    assert factory.references == {"x": "a.b"}
    bound = factory.bind_references({"a.b": 7, "a.c": 8})
    assert (bound.arguments["x"], bound.arguments["y"]) == (7, "31")
    assert factory.bind_references({}) == factory


@pytest.mark.parametrize(
    "arguments",
    [
        {"_target_": "torch.nn.Conv3d", "in_channels": 3, "out_channels": 4, "kernel_size": 3}
        | {"groups": 2},  # ValueError
        {"_target_": "monai.networks.nets.MedNeXt", "spatial_dims": 4},  # AssertionError
        {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU", "x": 1}]},
    ],
)
def test_an_error_names_the_key_and_the_target(arguments):
    with pytest.raises(UsageError) as caught:
        make_factory(**arguments)()
    assert str(caught.value).startswith(f"group (_target_: {arguments['_target_']}): ")
    assert "\n" not in str(caught.value)


def test_an_argument_that_a_class_does_not_have_is_answered_with_those_that_it_has():
    with pytest.raises(UsageError, match=r"argument 'inplase'; its arguments are inplace$"):
        make_factory(_target_="torch.nn.ReLU", inplase=True)()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.nn.Relu", "cannot import torch.nn.Relu: module 'torch.nn' has no attribute 'Relu'"),
        ("my_losses.Dice", "cannot import my_losses.Dice: No module named 'my_losses'"),
    ],
)
def test_a_name_that_cannot_be_imported_is_one_line(name, message):
    with pytest.raises(UsageError) as caught:
        make_factory(_target_=name)()
    assert str(caught.value) == f"group._target_: {message}"
    with pytest.raises(UsageError, match=rf"^group \(.*'{name}'.*{message.partition(': ')[2][:9]}"):
        make_factory(_target_="torch.nn.Sequential", _args_=[{"_target_": name}])()


def test_a_usage_error_of_the_target_keeps_its_message():
    target = "unet3d.checkpointing.per_level.PerLevelStrategy"
    factory = make_factory(_target_=target, encoder_last=["x"])
    with pytest.raises(UsageError, match=r"^checkpointing\.encoder_last must be a list of"):
        factory()
