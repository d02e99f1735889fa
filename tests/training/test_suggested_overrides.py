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
    words = ["model.channels=[8,16]", "model.prior_bias=false"]
    first, *others = suggest(composed, *words).class_not_learned
    assert first == "model.prior_bias=true"
    assert not [override for override in others if "width" in override or "prior" in override]


def test_every_limit_is_doubled_and_of_a_run_that_time_ended_only_time(composed):
    limits = ("trainer.max_steps=9", "trainer.max_epochs=3", "trainer.max_time=00:00:10:00")
    time = "trainer.max_time=00:00:20:00"
    longer = f"trainer.max_steps=18 trainer.max_epochs=6 {time}"
    assert suggest(composed, *limits).run_too_short == [longer]
    suggested = suggest_overrides(composed(*limits), out_of_time=True)
    assert suggested.run_too_short == [time]
    assert suggested.class_not_learned == [time, "data.foreground_fraction=0.9"]


def test_a_cheaper_step_has_fewer_volumes_and_channels(composed):
    accumulated = ("trainer.accumulate_grad_batches=6", "data.batch_size=1", "model=dynunet")
    patch = "a smaller data.patch_size"
    assert suggest(composed).cheaper_step == ["data.batch_size=1", "model.width=4", patch]
    assert suggest(composed, *accumulated).cheaper_step == [
        "trainer.accumulate_grad_batches=3",
        patch,
    ]
