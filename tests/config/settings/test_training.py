"""A training config is read once: into frozen settings, which other settings are derived from."""

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest

from tests.config.helpers.configs import compose_required, with_values
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import DEFAULT_MAX_EPOCHS, parse_training
from unet3d.errors import UsageError


def parse(values=None):
    return parse_training(with_values("train", values or {}))


def test_the_defaults_of_a_run():
    settings = parse()
    assert settings.strategy == "fused"
    assert settings.network.name == "unet_tiny"
    assert settings.precision == "32"
    assert settings.fold == 0
    assert settings.resume is None
    assert settings.init_from is None
    assert settings.trainer.launch == "local"
    assert settings.resolved["data"]["layout"]["root"] == "data/synthetic"


def list_settings(settings):
    """Yield a settings object and those in its fields."""
    yield settings
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from list_settings(value)


def test_settings_are_frozen_at_every_depth():
    parts = list(list_settings(parse()))
    assert len(parts) > 10
    for part in parts:
        name = fields(part)[0].name
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


def test_settings_do_not_change_with_the_config_that_they_were_read_from():
    composed = with_values("train", {})
    settings = parse_training(composed)
    composed.config.optimizer.lr = 7
    composed.config.augmentation.scale = [0, 9]
    assert settings.optimizer.arguments["lr"] == 3e-3
    assert settings.resolved["optimizer"]["lr"] == 3e-3
    assert settings.augmentation.arguments["scale"] == [0.7, 1.4]


def test_a_run_has_a_limit_of_epochs_unless_it_has_another_limit():
    assert parse().trainer.max_epochs == DEFAULT_MAX_EPOCHS
    for key, value in (("max_steps", 3), ("max_time", "00:00:01:00")):
        trainer = parse({f"trainer.{key}": value}).trainer
        assert trainer.max_epochs is None
    assert trainer.max_seconds == 60.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("limit_train_batches", 0, "must be a number above 0"),
        ("limit_train_batches", 0.0, "must be a number above 0"),
        ("num_sanity_val_steps", -2, "must be an int >= -1"),
        ("log_every_n_steps", -1, "must be an int >= 0"),
        ("overfit_batches", 1, "cannot be set"),
    ],
)
def test_numbers_of_batches_that_cannot_be_trained_or_validated_are_refused(key, value, message):
    with pytest.raises(UsageError, match=rf"trainer\.{key} {message}"):
        parse({f"trainer.{key}": value})


@pytest.mark.parametrize(
    ("given", "parsed"),
    [(n, n) for n in ("auto", "cpu", "cuda", "cuda:3", "mps")] + [("gpu", "cuda")],
)
def test_accelerators_have_the_names_of_all_devices_and_lightnings_gpu(given, parsed):
    assert parse({"trainer.accelerator": given}).trainer.accelerator == parsed


@pytest.mark.parametrize("processes", [{"trainer.devices": 2}, {"trainer.launch": "torchrun"}])
def test_one_gpu_is_not_for_several_processes(processes):
    with pytest.raises(UsageError, match=r"accelerator=cuda:1 is one GPU: for several processes"):
        parse({"trainer.accelerator": "cuda:1", **processes})


def test_the_trainer_gets_no_key_that_lightning_does_not_have():
    arguments = parse().trainer.factory.arguments
    assert "log_every_n_steps" in arguments
    assert not {"launch", "timeout_seconds"} & set(arguments)


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("precision", 16, "precision", "16"),
        ("precision", "bf16-true", "precision", "bf16-true"),
        ("precision", "16", "precision", "16"),
        ("precision", "16-mixed", "precision", "16"),
        ("precision", "bf16-mixed", "precision", "bf16"),
        ("precision", "32-true", "precision", "32"),
        ("fold", "none", "fold", None),
        ("fold", 4, "fold", 4),
        ("resume", "auto", "resume", "auto"),
        ("init_from", "a.ckpt", "init_from", Path("a.ckpt")),
        ("validation.hd95", False, "validate_hd95", False),
    ],
)
def test_a_value_is_parsed(key, value, field, expected):
    assert getattr(parse({key: value}), field) == expected


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("precision", [17, "half", None], "precision must be one of 32, 16, bf16, 16-true, "),
        ("compile", ["maybe", None, 1], "compile must be true or false"),
        ("tf32", ["maybe", None, 1], "tf32 must be true or false"),
        ("fold", ["x", 1.0, True, -1], "fold must be an int >= 0 or none"),
        ("seed", [-1, 2**32, "x", None, 1.0, True], "seed must be an int in 0..2^32 - 1"),
        ("save_every_seconds", [-1, "often"], "save_every_seconds must be a number >= 0"),
        ("max_skipped_steps", [-1, 0.5], "max_skipped_steps must be an int >= 0"),
        ("inference.overlap", [1], "inference.overlap must be in [0, 1), got 1"),
        ("inference.batch_size", [0], "inference.batch_size must be an int >= 1"),
        ("validation.hd95", ["x"], "validation.hd95 must be true or false"),
        ("evaluation.enabled", ["x"], "evaluation.enabled must be true or false"),
        ("evaluation.tolerance_mm", [-1], "evaluation.tolerance_mm must be a number >= 0"),
        ("evaluation.draw_worst", [-1], "evaluation.draw_worst must be an int >= 0"),
        ("memory.estimate", ["x"], "memory.estimate must be true or false"),
        ("memory.if_too_large", ["x"], "memory.if_too_large must be one of warn, error, ignore"),
        ("memory.snapshot", ["x"], "memory.snapshot must be true or false"),
        (
            "trainer.accelerator",
            ["tpu", None, 0],
            "trainer.accelerator must be auto, cpu, cuda, cuda:N",
        ),
        ("trainer.devices", [0, "all", True], "trainer.devices must be auto or an int >= 1"),
        ("trainer.launch", ["mpi"], "trainer.launch must be one of local, torchrun, slurm"),
        ("trainer.timeout_seconds", [0, None], "trainer.timeout_seconds must be a number above 0"),
        ("trainer.sync_batchnorm", ["x"], "trainer.sync_batchnorm must be true or false"),
        ("trainer.max_steps", [0, -3, "many"], "trainer.max_steps must be an int >= 1"),
        ("trainer.max_epochs", [0, 1.5], "trainer.max_epochs must be an int >= 1"),
        ("trainer.max_time", ["10m"], "trainer.max_time must be DD:HH:MM:SS"),
        ("trainer.accumulate_grad_batches", [0], "trainer.accumulate_grad_batches must be an int"),
        ("trainer.gradient_clip_val", [0, -1], "trainer.gradient_clip_val must be a number above"),
        ("trainer.check_val_every_n_epoch", [0], "trainer.check_val_every_n_epoch must be an int"),
        ("trainer.cuda_graph", ["x", 1, None], "trainer.cuda_graph must be auto, true or false"),
        (
            "trainer.enable_progress_bar",
            ["x"],
            "trainer.enable_progress_bar must be auto, true or false",
        ),
    ],
)
def test_a_wrong_value_is_refused(key, values, expected):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse({key: value})
        assert str(caught.value).startswith(expected)


def test_a_run_either_continues_another_or_starts_from_its_weights():
    with pytest.raises(UsageError, match=r"^use either resume= .* or init_from= .*, not both$"):
        parse({"resume": "a.ckpt", "init_from": "b.ckpt"})
    parse({"resume": "auto", "init_from": "b.ckpt"})  # auto may find nothing to continue


def test_a_run_that_reads_no_dataset_needs_no_data_root():
    settings = parse_training(compose_config(["data=nnunet"], "memory"))
    assert settings.data.root is None
    assert settings.data.layout is None


def test_overrides_are_added_after_the_users_own():
    composed = compose_config(["data.batch_size=3", "experiment=forum_small"], "memory")
    settings = parse_training(composed)
    variant = settings.with_overrides("precision=bf16", "data.batch_size=5")
    assert variant.precision == "bf16"
    assert variant.data.batch_size == 5
    assert variant.network.name == "naive_small"
    assert variant.composition.command == "memory"
    assert variant.composition.is_overridden("precision")
    assert (settings.precision, settings.data.batch_size) == ("16-true", 3)


def test_overrides_are_checked_as_the_command_line_is():
    with pytest.raises(UsageError, match=r"data\.batch_size must be an int >= 1, got 0"):
        parse_training(compose_required("train")).with_overrides("data.batch_size=0")


@pytest.mark.parametrize("strategy", ["none", "blocks", "lean"])
def test_another_strategy_is_what_the_command_line_would_have_selected(strategy):
    variant = parse().with_strategy(strategy)
    selected = parse_training(compose_config([f"checkpointing={strategy}"], "train"))
    assert variant.strategy == strategy
    assert variant.composition.overrides == ()
    assert replace(variant, composition=selected.composition) == selected


def test_another_strategy_replaces_the_arguments_of_the_one_before():
    variant = parse({"checkpointing.encoders": ["stream"]}).with_strategy("blocks")
    assert "encoders" not in variant.checkpointing.arguments
    assert "encoders" not in variant.resolved["checkpointing"]


def test_another_batch_size_changes_nothing_else():
    settings = parse()
    variant = settings.with_batch_size(9)
    assert variant.data.batch_size == 9
    assert variant.resolved["data"]["batch_size"] == 9
    assert variant.with_batch_size(settings.data.batch_size) == settings
