"""`unet3d search`."""

import json
import os
import signal

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from unet3d.__main__ import main
from unet3d.commands.search import read_config
from unet3d.config.compose import compose_config
from unet3d.errors import UsageError
from unet3d.training.callbacks.trials import PrunedTrialError

SPACE = "space={pool:[max,avg],optimizer.lr:{low:1e-3,high:3e-2,log:true},model.width:[4,8]}"
SHORT = ["trials=3", "startup=2", "prune_after=1", "trainer.max_steps=6", "logger=none"]
TINY = ["model.depth=2", "data.num_workers=0"]


@pytest.fixture
def search(small, tmp_path, monkeypatch):
    """Search in an empty folder, with two or more validations per trial; return the exit code."""
    monkeypatch.chdir(tmp_path)
    words = [*small, SPACE, *SHORT, *TINY, "hydra.run.dir=search"]
    return lambda *more: main(["search", *words, *more])


def read_trials(folder):
    return json.loads((folder / "search" / "search.json").read_text())["trials"]


@pytest.fixture
def train_nothing(monkeypatch):
    """Let each trial report one score instead of training."""

    def train(settings, folder, signals, callbacks, log):
        callbacks[0].report(1, 0.5)

    monkeypatch.setattr("unet3d.commands.search.train", train)


def interrupt_in_validation(monkeypatch, count):
    """Send SIGTERM in a validation, counted over the whole search."""
    from unet3d.training.callbacks.resume_state import ResumeState

    original, calls = ResumeState.on_validation_end, []

    def count_and_stop(self, trainer, module):
        original(self, trainer, module)
        if not trainer.sanity_checking:
            calls.append(trainer.global_step)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ResumeState, "on_validation_end", count_and_stop)


@pytest.mark.long
def test_an_interrupted_search_ends_like_an_uninterrupted_one(search, tmp_path, monkeypatch):
    assert search("hydra.run.dir=whole") == 0
    expected = json.loads((tmp_path / "whole" / "search.json").read_text())
    for number, validation in enumerate((3, 2)):  # a trial's last one, and others
        with monkeypatch.context() as patch:
            interrupt_in_validation(patch, validation)
            assert search() == 143, number
    assert not (tmp_path / "search" / "search.json").exists()
    assert search() == 0
    assert json.loads((tmp_path / "search" / "search.json").read_text()) == expected


def test_a_trial_that_falls_behind_is_pruned(search, tmp_path, monkeypatch, capsys):
    curves = iter([(0.5, 0.6), (0.5, 0.7), (0.1, 0.9), (0.6, 0.8)])

    def train(settings, folder, signals, callbacks, log):
        for number, value in enumerate(next(curves), start=1):
            if callbacks[0].report(number, value):
                raise PrunedTrialError

    monkeypatch.setattr("unet3d.commands.search.train", train)
    assert search("trials=4") == 0
    trials = read_trials(tmp_path)
    assert [t["state"] for t in trials] == ["complete", "complete", "pruned", "complete"]
    assert [t["value"] for t in trials if t["state"] == "complete"] == [0.6, 0.7, 0.8]
    assert trials[2]["validations"] == 1
    out = capsys.readouterr().out
    assert "pruned after 1 validation" in out
    assert "best val/dice: 0.8000, trial 3" in out


def test_a_trial_that_needs_too_much_memory_is_not_trained(search, tmp_path, monkeypatch, capsys):
    def train(settings, folder, signals, callbacks, log):
        assert settings.resolved["model"]["width"] == 4
        for epoch in (1, 2):
            callbacks[0].report(epoch, 0.5)
        return 0

    monkeypatch.setattr("unet3d.commands.search.train", train)

    def predict(step):
        return {4: 2**20, 8: 2**30}[step.network.model.arguments["width"]]

    monkeypatch.setattr("unet3d.commands.search.estimate_run_bytes", predict)
    assert search("budget_gib=0.5", "trials=6", "startup=4") == 0
    found = {(t["values"]["model.width"], t["state"]) for t in read_trials(tmp_path)}
    assert found == {("4", "complete"), ("8", "pruned")}
    assert "not trained: a step is estimated to need 1.0 GiB" in capsys.readouterr().out


def test_each_combination_of_lists_is_tried_once(small, tmp_path, monkeypatch, train_nothing):
    monkeypatch.chdir(tmp_path)
    words = [*small, *SHORT, "trials=9", "space={pool:[max,avg],loss.ce:[1,2]}"]
    assert main(["search", *words, "hydra.run.dir=search"]) == 0
    found = [tuple(trial["values"].values()) for trial in read_trials(tmp_path)]
    assert sorted(found) == [(pool, ce) for pool in ("avg", "max") for ce in "12"]


def test_a_search_goes_on_with_more_trials_and_another_one_needs_another_folder(
    search, train_nothing, capsys
):
    assert search("trials=1") == 0
    assert "\ntrial 0: " in capsys.readouterr().out
    assert search("trials=2") == 0
    assert "\ntrial 0: " not in capsys.readouterr().out
    assert search("trials=3", "space={pool:[max,median]}") == 2
    assert "holds a search with space" in capsys.readouterr().err
    assert search("trials=3", "seed=1") == 2
    assert "holds a search with overrides" in capsys.readouterr().err


def test_a_trial_that_was_killed_before_it_had_values_gets_them(search, train_nothing, tmp_path):
    assert search("trials=1") == 0
    optuna.load_study(study_name="search", storage="sqlite:///search/search.db").ask()
    assert search("trials=2") == 0
    first, second = (trial["values"] for trial in read_trials(tmp_path))
    assert len(first) == len(second) == 3
    assert first["optimizer.lr"] != second["optimizer.lr"]


def test_trials_that_fail_are_named_and_end_the_search(search, monkeypatch, capsys):
    def train(*_, callbacks, log):
        raise UsageError("no such thing")

    monkeypatch.setattr("unet3d.commands.search.train", train)
    assert search("trials=5") == 2
    assert "the first 3 trials failed: no such thing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_metric_that_no_trial_logs_is_named_with_those_that_are(search, capsys):
    assert search("monitor=val/dise", "trials=3") == 2
    assert "val/dise: no such metric; a validation logs val/dice, " in capsys.readouterr().err


def parse(*words):
    return read_config(compose_config(words, "search"))


def test_settings_of_a_trial_are_those_of_a_run_with_values_of_a_space(tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("model.width: {low: 4, high: 16, step: 4}\npool: [max, median]\n")
    settings = parse(f"space={file}", "trials=3", "optimizer=sgd", "precision=bf16")
    width, pool = IntDistribution(4, 16, step=4), CategoricalDistribution(["max", "median"])
    assert settings.space == {"model.width": width, "pool": pool}
    trial = settings.make_trial({"pool": "median", "model.width": 4})
    assert trial.resolved["pool"]["_target_"].endswith("MedianPool3d")
    assert (trial.resume, trial.step.precision) == ("auto", "bf16")


def test_a_space_may_have_earlier_names_of_keys():
    settings = parse("loss=cross_entropy", "space={loss.weight:[[1,2,3,4],[1,1,1,1]]}")
    loss = settings.make_trial({"loss.weight": "[1,2,3,4]"}).step.loss
    assert loss.arguments["class_weights"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["space=3"], "space must be keys with what to try"),
        (["space=missing.yaml"], "space: no file"),
        (["space={x:[]}"], r"space\.x must be a list of values, or .* got \[\]: "),
        (["space={x:{low:0,high:1,log:true}}"], r"space\.x must be .*: `low >= 1` must hold"),
        (["space={x:{low:1}}"], r"space\.x must be "),
        (["space={fold:[0,1]}", "fold=none"], "search needs validation cases"),
        (["space={fold:[0,1]}", "trainer.devices=2"], "search trains each trial in one process"),
        (["space={fold:[0,1]}", "resume=auto"], "search resumes automatically"),
    ],
)
def test_wrong_settings_are_named(words, message):
    with pytest.raises(UsageError, match=message):
        parse(*words)
