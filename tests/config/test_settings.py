"""A command's config is read once, into frozen settings; a wrong value is one line."""

import re
from functools import partial
from operator import attrgetter

import pytest

from tests.config.helpers.configs import with_values
from unet3d.commands import plan
from unet3d.commands.export import ExportConfig
from unet3d.commands.lr import LRConfig
from unet3d.commands.memory import MemoryConfig
from unet3d.commands.predict import PredictConfig
from unet3d.commands.suggest import SuggestConfig
from unet3d.config.compose import compose_config, format_overrides
from unet3d.config.fields import read_settings
from unet3d.errors import UsageError
from unet3d.evaluation import options
from unet3d.model.config import parse_network_config, parse_saved_network
from unet3d.text import GIB
from unet3d.training.config import parse_train_config

PARSERS = {
    "evaluate": options.read_config,
    "export": lambda c: read_settings(ExportConfig, c.config),
    "lr": lambda c: read_settings(LRConfig, c.config, training=parse_train_config(c)),
    "memory": lambda c: read_settings(MemoryConfig, c.config, training=parse_train_config(c)),
    "plan": plan.read_config,
    "predict": lambda c: read_settings(PredictConfig, c.config),
    "suggest": lambda c: read_settings(SuggestConfig, c.config, training=parse_train_config(c)),
    "train": parse_train_config,
}


def parse(command, values=None):
    return PARSERS[command](with_values(command, values or {}))


parse_run = partial(parse, "train")


@pytest.mark.parametrize(
    ("command", "key", "value", "field", "expected"),
    [
        ("train", "data.invalid_cases", "skip", "data.skip_invalid_cases", True),
        ("train", "data.ignore_label", -1, "data.ignore_labels", (-1,)),
        ("train", "data.background", [-1, "auto"], "data.background", (-1, "auto")),
        ("train", "fold", "none", "fold", None),
        ("train", "lr_factors", {"encoder": 2}, "step.lr_factors", {"encoder": 2.0}),
        ("train", "trainer.accelerator", "gpu", "step.accelerator", "cuda"),
        ("train", "trainer.max_steps", 1, "trainer.max_epochs", None),
        ("train", "trainer.max_time", "01:01:30:05", "trainer.max_seconds", 91805.0),
        ("evaluate", "classes", ["background", 1], "classes", ("background", "1")),
        ("evaluate", "regions", {"a": [1, 2], "b": 2}, "regions", {"a": (1, 2), "b": (2,)}),
        ("plan", "budget_gib", "auto", "budget_gib", None),
        ("predict", "tta", True, "flip_axes", None),
        ("predict", "tta", [2, 0], "flip_axes", (2, 0)),
        ("predict", "memory_gib", 0.5, "memory_bytes", GIB // 2),
        ("predict", "keep_largest_component", "a", "keep_largest_component", ("a",)),
        ("suggest", "patches", 4, "patches", (4.0,)),
        ("suggest", "strategies", "all", "strategies", None),
        ("suggest", "strategies", None, "strategies", None),  # in files of earlier versions
        ("predict", "precision", "auto", "precision", None),
    ],
)
def test_a_value_is_parsed(command, key, value, field, expected):
    assert attrgetter(field)(parse(command, {key: value})) == expected


SPACING = ["fine", [1, 1], [1, 1, 0], [1, 1, "x"]]


@pytest.mark.parametrize(
    ("command", "key", "values", "expected"),
    [
        ("train", "data.region_labels", [1, [-1], []], "a list of labels"),
        ("train", "data.normalize", ["max", ["auto", "ct"], []], "auto, zscore, zscore_nonzero"),
        ("train", "data.orientation", ["RAX", None], "one of L R"),
        ("train", "data.ignore_label", [1.5, "last"], "an int or a list of these"),
        ("train", "data.spacing_mm", SPACING, "three numbers above 0 or median"),
        ("train", "data.background", ["air", None, True, [0, "air"], []], "a number, auto, or a"),
        ("train", "data.annotated", [{}, {"a*": []}, {"a*": [[]]}, 3, ""], "patterns of case na"),
        ("train", "fold", ["x", 1.0, True, -1], "an int >= 0 or none"),
        ("train", "seed", [-1, 2**32, None], "an int >= 0 and below 4294967296"),
        ("train", "lr_factors", [3, {"encoder": 0}, {}], "null or parts of the network with a fa"),
        ("train", "trainer.accelerator", ["tpu", None, 0, "cuda:"], "gpu or auto, cpu, "),
        ("evaluate", "classes", ["liver", ["liver"], ["a", "a"], {"a": 1}], "unique names, backg"),
        ("evaluate", "regions", ["x", [1], {"a": []}, {"a": 1.5}, {}], "names with their labels"),
        ("evaluate", "tolerance_mm", [-1, "far", True, {"a": -1}], "a distance in mm"),
        ("memory", "cudnn", [9.1, "2"], "a version with three parts"),
        ("plan", "name", ["../x", ""], "letters, digits, - and _"),
        ("predict", "tta", ["x", 1, [0, 0], [3], [True], [[0]], None], "true or false or a list"),
        ("predict", "keep_largest_component", [{}, [[]]], "auto or none or a list of classes"),
        ("suggest", "budget_gib", [0, "all", True, None, float("inf")], "auto or a number above"),
        ("suggest", "precisions", ["bf16", [], ["bf16", 17]], "a list of one of 32, 16, bf16"),
        ("suggest", "patches", [0, [1, 4.1], ["half"], [True]], "fractions of data.patch_size"),
    ],
)
def test_a_wrong_value_is_refused(command, key, values, expected):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse(command, {key: value})
        message = str(caught.value)
        assert message.startswith(f"{key} must be {expected}")
        assert message.endswith(f", got {value!r}")


@pytest.mark.parametrize(
    ("command", "values", "message"),
    [
        ("train", {"data.annotated": "a.json", "data.regions": {"a": 1}}, "cannot be combined"),
        ("train", {"freeze": ["encoder"], "trainer.sync_batchnorm": True}, "cannot be combined"),
        ("train", {"resume": "a.ckpt", "init_from": "b.ckpt"}, "use either resume= "),
        ("train", {"trainer.overfit_batches": 1}, "trainer.overfit_batches cannot be set"),
        ("train", {"trainer.gradient_clip_algorithm": "value"}, "are clipped by their norm, to"),
        ("train", {"trainer.limit_train_batches": 2}, "an epoch has data.patches_per_case"),
        ("train", {"trainer.val_check_interval": 2}, "set trainer.check_val_every_n_epoch"),
        ("train", {"trainer.accelerator": "cuda:1", "trainer.devices": 2}, "=cuda:1 is one GPU"),
        ("export", {"format": "torch_export"}, "output=a.onnx does not fit format=torch_export"),
        ("lr", {"min_lr": 1, "max_lr": 1}, "min_lr must be below max_lr, got 1 and 1"),
        ("memory", {"view": "layers", "format": "png"}, "format=png needs output=FILE.png"),
        ("memory", {"view": "timeline"}, "view=timeline is a figure: add format=png"),
        ("memory", {"format": "png", "output": "a.png"}, "format=png draws view=timeline or"),
        ("plan", {"budget_gib": None}, "budget_gib must be given: GPU memory in GiB, or auto"),
        ("predict", {"device": "cuda:1", "devices": 2}, "use device=cuda for devices=2"),
    ],
)
def test_values_that_exclude_each_other_are_refused(command, values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(command, values)


def test_an_evaluation_replaces_no_report_of_a_run_and_needs_folders(tmp_path):
    parse("evaluate", {"output": str(tmp_path), "images": str(tmp_path)})
    (tmp_path / "report.json").touch()
    for values, message in (
        ({"output": str(tmp_path)}, r"holds a training run.*as in output=.*/scores"),
        ({"images": str(tmp_path / "none")}, "images: .*none is neither a file nor a folder"),
    ):
        with pytest.raises(UsageError, match=message):
            parse("evaluate", values)


def test_names_of_a_precision_are_one_experiment():
    resolved = [parse_run({"precision": name}).resolved["precision"] for name in ("32-true", 32)]
    assert resolved == [32, 32]
    assert parse_run({"precision": "bf16-mixed"}).resolved["precision"] == "bf16"


def read_step(*overrides):
    return parse_train_config(compose_config(overrides, "train")).step


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ([], {"checkpointing": "none"}),
        (["checkpointing.encoder_last=[stream]"], {"checkpointing": "lean"}),
        ([], {"checkpointing": "lean", "checkpointing.tile_mib": 8}),
        ([], {"precision": "bf16", "compile": True}),
        (["model=unetr"], {"data.patch_size": (16, 32, 16)}),  # an argument of it follows
        ([], {"pool": "approx_median"}),
        (["model=plain_small"], {"model": "unet_small"}),
    ],
)
def test_a_changed_step_is_what_the_command_line_would_have_given(given, changes):
    groups = [word for word in given if "." not in word.partition("=")[0]]
    typed = read_step(*groups, *format_overrides(changes).split(" "))
    assert read_step(*given).vary(changes) == typed


def compose_network(*overrides):
    composed = compose_config(overrides, "train")
    return parse_network_config(composed.config, composed.composition)


def test_channels_of_every_level_exclude_what_they_would_override():
    with pytest.raises(UsageError, match=r"^model\.channels lists .* remove .*model\.width"):
        compose_network("model.channels=[4,8]", "model.width=3")
    network = compose_network("model.channels=[4,8]").bind(in_channels=1, num_outputs=2).build()
    assert [level.convs[-1].conv.out_channels for level in network.encoder] == [4, 8]


def test_a_saved_network_is_allowed_what_the_caller_allows():
    saved = {
        "model": {"_target_": "argparse.Namespace", "prior_bias": True},
        "pool": {"_target_": "unet3d.pool.max.MaxPool3d", "_partial_": True},
        "allow_targets": ["argparse"],
    }
    with pytest.raises(UsageError, match=r"pool\._target_ names posix\.getcwd"):
        parse_saved_network({**saved, "pool": {"_target_": "posix.getcwd"}}, ["argparse"])
    for allowed in (["argparse"], None):
        assert vars(parse_saved_network(saved, allowed).model()) == {}
