import pytest

from unet3d.training.callbacks.training_warnings import suggest_overrides


def suggest(composed, *overrides):
    return suggest_overrides(composed(*overrides))


def test_a_run_gets_more_of_what_it_has_little_of(composed):
    suggested = suggest(composed, "trainer.max_steps=null")
    assert suggested.run_too_short == ["trainer.max_epochs=40"]
    assert suggested.class_not_learned == [
        "trainer.max_epochs=40",
        "data.foreground_fraction=0.9",
        "model.width=16",
    ]
    assert suggested.loss_not_falling == ["optimizer.lr=0.0003", "optimizer.lr=0.03"]


def test_nothing_is_suggested_that_is_set_already_or_that_the_network_does_not_have(composed):
    overrides = ["model=dynunet", "data.foreground_fraction=1", "trainer.max_steps=50"]
    assert suggest(composed, *overrides).class_not_learned == ["trainer.max_steps=100"]
    channels = suggest(composed, "model.channels=[8,16]").class_not_learned
    assert not [override for override in channels if "width" in override]


@pytest.mark.parametrize(
    ("overrides", "longer"),
    [
        (["trainer.max_time=00:00:10:00"], "trainer.max_time=00:00:20:00"),
        (["trainer.max_epochs=3"], "trainer.max_epochs=6"),
        (
            ["trainer.max_steps=9", "trainer.max_epochs=3"],
            "trainer.max_steps=18 trainer.max_epochs=6",
        ),
    ],
)
def test_every_limit_is_doubled(composed, overrides, longer):
    suggested = suggest(composed, "trainer.max_steps=null", *overrides)
    assert suggested.run_too_short == [longer]


def test_the_prior_bias_is_suggested_first_if_it_is_off(composed):
    suggested = suggest(composed, "model.prior_bias=false").class_not_learned
    assert suggested[0] == "model.prior_bias=true"
    assert not [word for word in suggest(composed).class_not_learned if "prior" in word]


def test_a_run_that_time_ended_is_asked_for_time_alone(composed):
    limits = ("trainer.max_steps=9", "trainer.max_epochs=3", "trainer.max_time=00:00:10:00")
    suggested = suggest_overrides(composed(*limits), out_of_time=True)
    assert suggested.run_too_short == ["trainer.max_time=00:00:20:00"]
    assert suggested.class_not_learned == [
        "trainer.max_time=00:00:20:00",
        "data.foreground_fraction=0.9",
    ]


def test_a_cheaper_step_has_fewer_volumes_and_channels(composed):
    accumulated = ("trainer.accumulate_grad_batches=6", "data.batch_size=1", "model=dynunet")
    assert suggest(composed).cheaper_step == [
        "data.batch_size=1",
        "model.width=4",
        "a smaller data.patch_size",
    ]
    assert suggest(composed, *accumulated).cheaper_step == [
        "trainer.accumulate_grad_batches=3",
        "a smaller data.patch_size",
    ]
