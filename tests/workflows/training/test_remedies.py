from unet3d.config.instantiate import to_plain_dict
from unet3d.workflows.training.remedies import suggest_remedies


def proposed(composed, *overrides):
    return suggest_remedies(to_plain_dict(composed(*overrides).config), 20)


def test_a_class_that_is_not_learned_is_met_by_what_the_run_has_less_of(composed):
    found = proposed(composed, "trainer.max_steps=null")
    assert found.class_not_learned == [
        "trainer.max_epochs=40",
        "data.foreground_fraction=0.9",
        "model.width=16",
    ]
    assert found.loss_not_falling == ["optimizer.lr=0.0003", "optimizer.lr=0.03"]


def test_what_is_set_already_or_what_the_network_does_not_have_is_not_proposed(composed):
    words = ["model=dynunet", "data.foreground_fraction=1", "trainer.max_steps=50"]
    assert proposed(composed, *words).class_not_learned == ["trainer.max_steps=100"]
    words = ["trainer.max_steps=null", "trainer.max_time=00:00:10:00", "model.channels=[8,16]"]
    assert proposed(composed, *words).class_not_learned[0] == "trainer.max_time=00:00:20:00"
    assert not [w for w in proposed(composed, *words).class_not_learned if "width" in w]


def test_a_head_that_does_not_begin_at_the_prior_is_proposed_first(composed):
    config = to_plain_dict(composed().config)
    for known, proposals in ((False, ["model.prior_bias=true"]), (True, [])):
        config["model"]["prior_bias"] = known
        found = suggest_remedies(config, 20).class_not_learned
        assert [word for word in found if "prior" in word] == proposals
        assert found[: len(proposals)] == proposals
