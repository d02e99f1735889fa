"""Arguments of a network that depend on the dataset are bound once it is known."""

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.compose import compose_config
from unet3d.config.settings.network import parse_network, parse_saved_network
from unet3d.errors import UsageError


def parse(*overrides):
    composed = compose_config(overrides, "train")
    return parse_network(composed.config, composed.composition)


def test_channels_and_outputs_are_bound_late_under_the_names_that_the_network_has():
    bound = parse("model=dynunet", "data=decathlon").bind(in_channels=4, num_outputs=3)
    assert bound.model.arguments["in_channels"] == 4
    assert bound.model.arguments["out_channels"] == 3


def test_binding_leaves_the_settings_unchanged():
    network = parse("data=decathlon")
    bound = network.bind(in_channels=2, num_outputs=5)
    assert network.model.arguments["num_classes"] is None
    assert bound.model.arguments["num_classes"] == 5
    assert bound.model.arguments["depth"] == network.model.arguments["depth"]


def test_a_size_that_the_config_gives_is_not_bound():
    network = parse("data=decathlon", "model.in_channels=1")
    bound = network.bind(in_channels=4, num_outputs=3)
    assert bound.model.arguments["in_channels"] == 1
    assert bound.model.arguments["num_classes"] == 3


@pytest.mark.parametrize(
    ("overrides", "is_chosen"),
    [([], False), (["pool=max"], True), (["pool=median"], True), (["experiment=none"], False)],
)
def test_a_pooling_is_chosen_if_somebody_asked_for_it(overrides, is_chosen):
    assert parse(*overrides).pool_is_chosen is is_chosen


def test_the_prior_bias_is_no_argument_of_the_network():
    network = parse("model.prior_bias=false")
    assert not network.prior_bias
    assert "prior_bias" not in network.model.arguments
    composed = with_values("train", {"model.prior_bias": "no"})
    with pytest.raises(UsageError, match=r"^model\.prior_bias must be true or false, got 'no'$"):
        parse_network(composed.config, composed.composition)


@pytest.mark.parametrize("key", ["depth", "width", "max_width"])
def test_channels_of_every_level_exclude_what_they_would_override(key):
    with pytest.raises(UsageError, match=rf"^model\.channels lists .* remove .*model\.{key}"):
        parse("model.channels=[4,8]", f"model.{key}=3")
    assert parse("model.channels=[4,8]").model.arguments["channels"] == [4, 8]


def test_a_saved_network_is_allowed_what_the_caller_allows():
    saved = {
        "model": {"_target_": "argparse.Namespace", "prior_bias": True},
        "pool": {"_target_": "unet3d.pool.max.MaxPool3d", "_partial_": True},
        "allow_targets": ["argparse"],
    }
    with pytest.raises(UsageError, match=r"model\._target_ names argparse\.Namespace"):
        parse_saved_network(saved, [])
    for allowed in (["argparse"], None):
        assert vars(parse_saved_network(saved, allowed).model()) == {}
