"""What options of a training do: limits, schedules, classes, fine-tuning, seeds."""

import json

import nibabel
import numpy as np
import pytest
import torch

from tests.contract.helpers.datasets import make_image, save
from tests.contract.helpers.pairs import SIZE, draw_label, write_pairs
from tests.contract.helpers.runs import (
    equal,
    read_curve,
    read_events,
    read_report,
    read_weights,
    send_signals,
)


def read_last(folder):
    return read_weights(folder / "run" / "checkpoints" / "last.ckpt")


def select(weights, part):
    """Return the weights of a part of the network."""
    return {name: w for name, w in weights.items() if name.startswith(f"model.{part}.")}


# limits and schedules


def test_max_epochs_ends_a_run(train, tmp_path):
    assert train("trainer.max_steps=null", "trainer.max_epochs=2", "logger=none").code == 0
    assert read_report(tmp_path / "run")["steps"] == 4


def test_max_time_ends_a_run_and_the_report_says_so(train, tmp_path):
    assert train("logger=none").code == 0
    more = ["trainer.max_steps=2999", "trainer.max_time=00:00:00:03", "validation.hd95=false"]
    assert train("logger=none", *more, "resume=auto").code == 0
    report = read_report(tmp_path / "run")
    assert report["finished"] is True
    assert 1 <= report["steps"] < 2999
    assert [warning for warning in report["warnings"] if "trainer.max_time ended" in warning]


def test_early_stopping_ends_a_run_after_its_patience(train, tmp_path):
    options = ["callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=1"]
    assert train(*options, "trainer.max_steps=20", "optimizer.lr=1e-9", "logger=none").code == 0
    assert read_report(tmp_path / "run")["steps"] == 4


def test_the_rate_rises_from_the_first_step_and_falls_polynomially_to_the_last(trained):
    rates = [event.value for event in read_events(trained.folder).Scalars("train/lr")]
    assert rates[0] == pytest.approx(3e-3 * 0.001 / 0.101)
    assert rates[-1] == pytest.approx(3e-3 * (1 - 5 / 6) ** 0.9)


# classes


def test_a_run_learns_and_scores_overlapping_regions(train, tmp_path):
    assert train("data.regions={whole:[1,2,3],core:[2,3],active:[3]}", "logger=none").code == 0
    metrics = read_report(tmp_path / "run")["metrics"]
    classes = {name.removeprefix("val/dice/") for name in metrics if "val/dice/" in name}
    assert classes == {"whole", "core", "active"}


def test_voxels_with_the_ignore_label_teach_nothing(unet3d, tmp_path):
    data = write_pairs(tmp_path / "data", lambda number: np.full(SIZE, 7, np.uint8))
    options = [*data, "fold=none", "data.ignore_label=7", "optimizer.weight_decay=0", "logger=none"]
    weights = []
    for steps in (1, 3):
        assert unet3d("train", *options, f"trainer.max_steps={steps}").code == 0
        weights.append(read_last(tmp_path))
    assert equal(*weights)


def test_a_case_is_scored_in_the_classes_that_it_annotates(unet3d, tmp_path):
    def draw_front(number):
        return np.where(draw_label(number) == 1, 1, 0).astype(np.uint8)

    data = write_pairs(tmp_path / "data", draw_front)
    options = ["data.classes=[background,front,back]", "data.annotated={case_*:[front]}"]
    assert unet3d("train", *data, *options, "evaluation.enabled=true").code == 0
    result = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    (scores,) = result["cases"].values()
    assert scores["front"]["dice"] is not None
    assert scores["back"]["dice"] is None
    assert result["per_class"]["back"]["absent_from_both"] == 0


def test_fold_none_trains_on_every_case_without_validation(train, tmp_path):
    options = ["trainer.max_steps=null", "trainer.max_epochs=1", "data.batch_size=1", "fold=none"]
    assert train(*options, "logger=none").code == 0
    report = read_report(tmp_path / "run")
    assert report["steps"] == 5
    assert not [name for name in report["metrics"] if name.startswith("val/")]
    assert not (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()


# weights


def test_frozen_parts_keep_the_weights_that_a_run_starts_from(train, trained, tmp_path):
    options = [f"init_from={trained.best}", "freeze=[encoder]", "logger=none", "fold=none"]
    assert train(*options).code == 0
    before, after = read_weights(trained.best), read_last(tmp_path)
    assert equal(select(before, "encoder"), select(after, "encoder"))
    assert not equal(select(before, "decoder"), select(after, "decoder"))


def test_a_network_that_was_trained_on_validation_cases_is_reported(train, trained, tmp_path):
    options = [f"init_from={trained.folder}", "logger=none"]
    assert "validation case" not in read_warnings(train(*options), tmp_path)
    warning = "the network of init_from= was trained on 1 of 1 validation case"
    assert warning in read_warnings(train(*options, "fold=1"), tmp_path)
    options[0] = f"init_from={tmp_path / 'first'}"  # of fold 1, whose own start was fold 0
    (tmp_path / "run").rename(tmp_path / "first")
    assert warning in read_warnings(train(*options, "fold=1"), tmp_path)
    resumed = train(*options[1:], "fold=1", "trainer.max_steps=7", "resume=auto")
    assert warning in read_warnings(resumed, tmp_path)


def read_warnings(ended, folder):
    assert ended.code == 0, ended.err
    return " ".join(read_report(folder / "run")["warnings"])


def test_weights_that_do_not_fit_are_named_and_the_others_are_taken(train, trained, tmp_path):
    options = [f"init_from={trained.best}", "freeze=[encoder,decoder]", "data.num_classes=5"]
    ended = train(*options, "logger=none", "fold=none")
    assert ended.code == 0
    assert "heads.0" in ended.out
    before, after = read_weights(trained.best), read_last(tmp_path)
    assert equal(select(before, "decoder"), select(after, "decoder"))


def test_a_factor_scales_the_steps_of_a_part(train, trained, tmp_path):
    options = [f"init_from={trained.last}", "optimizer=sgd", "optimizer.momentum=0"]
    options += ["optimizer.nesterov=false", "optimizer.weight_decay=0", "optimizer.lr=1"]
    options += ["scheduler=constant", "scheduler.warmup=0", "logger=none", "fold=none"]
    before, steps = read_weights(trained.last), []
    for factors in ("null", "{encoder:0.25}"):
        assert train(*options, f"lr_factors={factors}").code == 0
        after = read_last(tmp_path)
        steps.append({name: after[name] - before[name] for name in before})
    for part, factor in {"encoder": 0.25, "decoder": 1}.items():
        full, scaled = (torch.cat([w.flatten() for w in select(s, part).values()]) for s in steps)
        assert scaled.norm() / full.norm() == pytest.approx(factor, rel=1e-2)


def test_head_warmup_first_changes_the_heads_alone(train, trained, tmp_path):
    options = [f"init_from={trained.last}", "head_warmup=0.5", "trainer.max_steps=8", "fold=none"]
    signals = send_signals(tmp_path, ("train_batch_start", 2, "SIGTERM"))
    assert train(*options, *signals, "logger=none").code == 143
    before, after = read_weights(trained.last), read_last(tmp_path)
    changed = {name.split(".")[1] for name in before if not before[name].equal(after[name])}
    assert changed == {"heads"}


def test_a_checkpoint_holds_the_average_of_the_weights(train, trained, tmp_path):
    options = [f"init_from={trained.last}", "optimizer.lr=0.1", "scheduler.warmup=0"]
    before, after = read_weights(trained.last), []
    for decay in ("null", "0.9"):
        assert train(*options, "logger=none", "fold=none", f"ema_decay={decay}").code == 0
        after.append(read_last(tmp_path))
    for name, weight in before.items():
        expected = 0.1 * weight + 0.9 * after[0][name]  # the first decay is 1 / 10
        torch.testing.assert_close(after[1][name], expected)


def test_an_average_changes_the_saved_weights_but_not_the_training(train, trained, tmp_path):
    assert train("trainer.max_steps=6", "logger=csv", "ema_decay=0.9").code == 0
    losses = [read_curve(folder, "train/loss") for folder in (trained.folder, tmp_path / "run")]
    assert losses[0] == losses[1]
    assert not equal(read_last(tmp_path), read_weights(trained.last))


VALUES = [0, *range(17, 17 + 3 * 299, 3)]
"""Of 300 classes, which a byte cannot hold."""


@pytest.mark.parametrize("values", [[0, 17, 1035], VALUES])
def test_labels_keep_the_values_that_files_have(unet3d, tmp_path, values):
    for number in range(5):
        classes = np.random.default_rng(number).integers(0, len(values), (16, 16, 16))
        labels = np.array(values, np.uint16)[classes]
        save(tmp_path / "scans" / "images" / f"{number}.nii.gz", make_image(number))
        save(tmp_path / "scans" / "labels" / f"{number}.nii.gz", labels)
    names = {value: f"name{value}" for value in [*values, 60_000]}
    (tmp_path / "table.json").write_text(json.dumps(names))
    data = ["data=pairs", "data.root=scans", "data.patch_size=[16,16,16]"]
    found = unet3d("check", *data, f"data.num_classes={len(values)}")
    assert f"set data.label_values={'auto' if len(values) > 20 else values}" in found.out
    options = ["data.label_values=table.json", "trainer.max_steps=1", "memory.estimate=false"]
    small = ["model.width=2", "model.depth=2", "logger=tensorboard", "hydra.run.dir=run"]
    ended = unet3d("train", *data, *options, *small)
    assert ended.code == 0, ended.err
    run = tmp_path / "run"
    tags = read_events(run).Tags()
    curves = [tag for tag in tags["scalars"] if tag.startswith("val/dice/")]
    if len(values) > 20:  # the worst are listed, and a histogram has all
        assert (ended.out.count("Dice, name"), curves) == (5, [])
        assert "val/dice by class" in tags["histograms"]
    else:
        assert (ended.out.count("Dice, name"), len(curves)) == (2, 2)
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert content["unet3d"]["preprocessing"]["label_values"] == values
    assert content["unet3d"]["classes"] == [f"name{value}" for value in values]
    assert not read_report(run)["evaluation"]["errors"]
    weights = content["state_dict"]
    bias = next(name for name in weights if name.endswith("heads.0.bias"))
    weights[bias][-1] += 1000  # all voxels get the last class
    torch.save(content, run / "checkpoints" / "best.ckpt")
    predict = ["predict", "checkpoint=run", "input=scans/images", "output=out", "device=cpu"]
    assert unet3d(*predict).code == 0
    predicted = nibabel.load(tmp_path / "out" / "0.nii.gz")
    assert np.unique(predicted.dataobj).tolist() == [values[-1]]
    known = {"labels": {"0": "background", "1": "other"}}  # the run knows better
    (tmp_path / "scans" / "dataset.json").write_text(json.dumps(known))
    references = ["references=scans/labels", "checkpoint=run", "output=scores"]
    assert unet3d("evaluate", "predictions=out", *references).code == 0
    scores = json.loads((tmp_path / "scores" / "evaluation.json").read_text())
    assert scores["per_class"][f"name{values[-1]}"]["dice"]["mean"] > 0


# seeds and devices


@pytest.mark.parametrize(("option", "is_same"), [("data.num_workers=2", True), ("seed=1", False)])
def test_the_seed_alone_decides_the_weights(train, trained, tmp_path, option, is_same):
    assert train("trainer.max_steps=6", "logger=none", option).code == 0
    assert equal(read_last(tmp_path), read_weights(trained.last)) is is_same


def test_a_run_on_the_cpu_touches_no_gpu(train, tmp_path, monkeypatch):
    def refuse():
        raise AssertionError("CUDA was initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    assert train("logger=none").code == 0
    assert read_report(tmp_path / "run")["device"] == "cpu"
