"""A run resumes from what it saved; from anything else not at all, or bit for bit the same."""

import random
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import lr_scheduler
from unet3d.lit.callbacks.lr import TorchSchedule
from unet3d.lit.optimizer_checks import find_odd_optimizer
from unet3d.lit.resume_checks import find_odd_callback, find_odd_scaler

from tests.helpers.training import fit
from tests.lit.helpers.hostile_checkpoints import (
    LAYOUTS,
    TENSORS,
    VALUES,
    change,
    get,
    iter_paths,
    remove,
)
from unet3d.checkpoint_file import load_checkpoint, save_checkpoint
from unet3d.cli.train import build_training
from unet3d.config.compose import compose_config, list_options
from unet3d.config.settings.training import parse_training
from unet3d.errors import UsageError
from unet3d.stop_signals import SignalListener
from unet3d.workflows.training.run import resolve_start

pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor creation")

TINY = ("model.width=4", "model.depth=2", "data.num_workers=0", "logger=none", "callbacks=[]")
STATE = ("optimizer_states", 0, "state", 0)
GROUP = ("optimizer_states", 0, "param_groups", 0)
ONE_CYCLE = "scheduler=one_cycle scheduler.total_steps=5"


@pytest.fixture(scope="session")
def run_from(small, tmp_path_factory):
    """Return a function that trains to a step from the content of a checkpoint.

    Without a step it only checks the content.
    """
    folder = tmp_path_factory.mktemp("hostile")
    path, runs = folder / "x.ckpt", {}

    def build(steps, options):
        words = [*small, *TINY, f"trainer.max_steps={steps}", f"resume={path}", *options]
        settings = parse_training(compose_config(words, "train"))
        return build_training(settings, folder / "run")

    def run(content, steps, *options):
        if content is None:
            training, checkpoint = build(steps, [*options, "resume=null"]), None
        else:
            save_checkpoint(content, path)
            if options not in runs:
                runs[options] = build(2, options)
            resolve_start(runs[options])  # refused: the run can be used again
            if steps is None:  # what is not refused could end the process
                return None
            training = build(steps, options)
            checkpoint = resolve_start(training).checkpoint
        fit(training, checkpoint, SignalListener())
        return load_checkpoint(folder / "run" / "checkpoints" / "last.ckpt", mmap=False)

    return run


@pytest.fixture(scope="session")
def saved(run_from):
    """Return what a run of one step saves with an optimizer; cached."""
    contents = {}

    def save(*options):
        if options not in contents:
            contents[options] = run_from(None, 1, *options)
        return contents[options]

    return save


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("exp_avg", kind) for kind in TENSORS),
        *(("step", kind) for kind in TENSORS if kind not in LAYOUTS),
    ],
)
def test_a_state_that_is_no_state_of_the_optimizer_is_refused(saved, run_from, name, kind):
    path = (*STATE, name)
    value = TENSORS[kind](get(saved(), path))
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        run_from(change(saved(), path, value), None)


@pytest.mark.parametrize("optimizer", list_options("optimizer"))
def test_each_value_of_each_optimizers_state_has_its_own_size(saved, run_from, optimizer):
    option = f"optimizer={optimizer}"
    content = saved(option)
    for name, value in get(content, STATE).items():
        path = (*STATE, name)
        for other in (torch.zeros(*value.shape, 3), "x", None):
            with pytest.raises(UsageError, match=name):
                run_from(change(content, path, other), None, option)
        with pytest.raises(UsageError, match=r"state\[0\] has"):
            run_from(remove(content, path), None, option)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*STATE[:3], 99), {}, "belongs to no parameter"),
        ((*STATE[:3], "0"), {}, "belongs to no parameter"),
        ((*STATE, "more"), torch.zeros(2), "state.0. has"),
        ((*GROUP, "params"), [0], "its parameters are not those of this run"),
        ((*GROUP, "lr"), torch.zeros(3), "lr is a tensor"),
        ((*GROUP, "initial_lr"), float("nan"), "initial_lr is nan"),
        ((*GROUP, "initial_lr"), 2**2000, "initial_lr is"),
        ((*GROUP, "initial_lr"), 1e9, "initial_lr is 1000000000.0, not 0.003"),
        ((*GROUP, "lr"), -1.0, "Invalid learning rate"),
        ((*GROUP, "lr"), torch.tensor(0.003), "lr is a tensor"),
        ((*GROUP, "betas"), (0.5, 0.5), r"betas is \(0.5, 0.5\), not \(0.9, 0.999\)"),
        ((*GROUP, "eps"), torch.tensor(1e-8), "eps is a tensor"),
        ((*GROUP, "lr_factor"), 2.0, "lr_factor is 2.0, and this run has none"),
        ((*GROUP, "starts_at"), True, "starts_at is True, and this run has none"),
        ((*GROUP, "betas"), (0.9,), "betas is"),
        ((*GROUP, "fused"), None, "fused is None, not True"),
        ((*GROUP, "capturable"), True, "capturable is True"),
        (("optimizer_states",), [], "optimizer_states is"),
        (("lr_schedulers",), [{}], "lr_schedulers is"),
        (("global_step",), 2**70, "no training state"),
        (("skipped_steps",), "x", "skipped_steps is 'x'"),
        (("native_amp_scaling_state",), {}, "another version of Lightning"),
        (("pytorch-lightning_version",), "0.1", "pytorch-lightning_version"),
        (("pytorch-lightning_version",), "2.x", "pytorch-lightning_version"),
        (("pytorch-lightning_version",), "2.0.0.dev0", "pytorch-lightning_version"),
        (("pytorch-lightning_version",), "3.0.0.dev0", "pytorch-lightning_version"),
        (
            ("state_dict", "model.heads.0.bias"),
            torch.zeros(4, dtype=torch.int64),
            "is of torch.int",
        ),
        (("state_dict", 7), torch.zeros(4), "which is not a string"),
        (("callbacks", "ResumeState", "batch"), 1000, "of an epoch that has"),
        (("callbacks", "StoppingLimits", "elapsed"), float("nan"), "StoppingLimits is"),
        (("callbacks", "TrainingWarnings", "losses", "batches"), 0, "TrainingWarnings is"),
        (("callbacks", "Curves", "train/loss", "points"), [[1]], "Curves is"),
    ],
)
def test_what_a_run_does_not_save_is_refused_by_its_name(saved, run_from, path, value, message):
    with pytest.raises(UsageError, match=message):
        run_from(change(saved(), path, value), None)


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("exp_avg", float("nan"), "exp_avg contains NaN or infinite values"),
        ("exp_avg", float("inf"), "exp_avg contains NaN or infinite values"),
        ("exp_avg_sq", -1.0, "exp_avg_sq has the value -1, below 0"),
        ("step", -1.0, "step has the value -1, below 0"),
    ],
)
def test_numbers_that_no_step_gives_a_state_are_refused(saved, run_from, name, number, message):
    path = (*STATE, name)
    value = get(saved(), path).clone()
    value.view(-1)[-1] = number
    with pytest.raises(UsageError, match=message):
        run_from(change(saved(), path, value), None)


def test_an_optimizer_that_has_stepped_has_a_state(saved, run_from):
    content = saved("trainer.max_steps=2")
    with pytest.raises(UsageError, match="state is empty, but the optimizer has stepped"):
        run_from(change(content, STATE[:3], {}), None)
    run_from(change(content, ("skipped_steps",), 2) | {"optimizer_states": _clear(content)}, None)


def _clear(content):
    return [{**content["optimizer_states"][0], "state": {}}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", value) for value in (0.0, -1.0, float("inf"), float("nan"), "x")),
        *(("growth_interval", 0.5), ("backoff_factor", 5.0), ("_growth_tracker", -1)),
    ],
)
def test_a_loss_scale_that_no_run_has_is_refused(name, value):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = SimpleNamespace(precision_plugin=plugin)
    state = {**plugin.state_dict(), "scale": 8.0, "_growth_tracker": 3}
    assert find_odd_scaler({"MixedPrecision": state}, trainer) is None
    assert find_odd_scaler({"MixedPrecision": {**state, name: value}}, trainer) is not None
    assert find_odd_scaler({}, trainer) is not None


def test_states_that_share_their_values_are_refused(saved, run_from):
    shared = get(saved(), (*STATE, "exp_avg_sq"))
    with pytest.raises(UsageError, match="shares its values"):
        run_from(change(saved(), (*STATE, "exp_avg_sq"), None) | _share(saved(), shared), None)


def test_states_in_the_layout_of_their_parameters_are_accepted():
    weight = nn.Parameter(torch.rand(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d))
    optimizer = torch.optim.AdamW([weight], fused=True)
    fresh = deepcopy(optimizer)
    weight.grad = torch.rand_like(weight)
    optimizer.step()
    assert find_odd_optimizer(optimizer.state_dict(), fresh) is None
    plain = nn.Parameter(torch.rand(4, 3, 2, 2, 2))
    other = torch.optim.AdamW([plain], fused=True)
    assert "exp_avg has the strides" in find_odd_optimizer(optimizer.state_dict(), other)


def _share(content, tensor):
    states = [dict(content["optimizer_states"][0])]
    state = dict(states[0]["state"])
    states[0]["state"] = state
    state[0] = {**state[0], "exp_avg": tensor, "exp_avg_sq": tensor}
    return {"optimizer_states": states}


def test_the_counters_of_lightnings_loops_are_not_taken_from_the_file(saved, run_from):
    expected = run_from(saved(), 2)
    for loops in (None, "x", {}, {"fit_loop": {"epoch_progress": 5}}):
        assert_equal_runs(run_from(change(saved(), ("loops",), loops), 2), expected)


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        ("ema_decay=0.9", ("trained_weights", "model.heads.0.bias"), torch.zeros(9)),
        ("ema_decay=0.9", ("averaged_steps",), -1),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "base_lrs"), "x"),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "base_lrs"), [1.0]),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "T_mult"), 3),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "T_i"), 0),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "T_cur"), torch.tensor(1.0)),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule"), {}),
        ("scheduler=plateau", ("callbacks", "TorchSchedule", "factor"), 0.1),
        ("scheduler=plateau", ("callbacks", "TorchSchedule", "best"), float("nan")),
        (ONE_CYCLE, (*GROUP, "betas"), (0.5, 0.999)),
        (ONE_CYCLE, (*GROUP, "betas"), (0.9, 0.5)),
        (ONE_CYCLE, (*GROUP, "max_lr"), 1.0),
        (ONE_CYCLE, ("callbacks", "TorchSchedule", "last_epoch"), 10**9),
        (ONE_CYCLE, ("callbacks", "TorchSchedule", "_step_count"), 3),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "step"), 5),
        ("scheduler=warm_restarts", ("callbacks", "TorchSchedule", "T_cur"), float("nan")),
    ],
)
def test_averages_and_schedules_are_compared_with_those_of_the_run(
    saved, run_from, option, path, value
):
    with pytest.raises(
        UsageError, match=r"trained_weights|average of the|TorchSchedule|betas|max_lr"
    ):
        run_from(change(saved(*option.split()), path, value), None, *option.split())


SCHEDULES = [
    lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_schedule_of_torch_resumes_from_what_it_saves(make):
    def build():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        optimizer.param_groups[0]["initial_lr"] = 0.1
        return optimizer, make(optimizer)

    (optimizer, schedule), (fresh, other) = build(), build()
    trainer = SimpleNamespace(callbacks=[TorchSchedule(make, limits=None)])
    for _ in range(6):
        optimizer.step()
        schedule.step()
        states = {"TorchSchedule": schedule.state_dict()}
        assert find_odd_callback(states, trainer, {"TorchSchedule": other}, 6) is None
        assert find_odd_optimizer(optimizer.state_dict(), fresh) is None


@pytest.mark.parametrize(
    ("callback", "key", "values"),
    [
        (EarlyStopping("val/dice"), "best_score", ["x", 5, torch.zeros(3), None]),
        (EarlyStopping("val/dice"), "wait_count", ["x", torch.tensor(1.0).int(), None]),
        (EarlyStopping("val/dice"), "patience", ["x", [3]]),
        (Timer("00:01:00:00"), "time_elapsed", [{}, 5, torch.zeros(1)]),
    ],
)
def test_callbacks_of_lightning_get_the_values_they_save(callback, key, values):
    trainer, state = SimpleNamespace(callbacks=[callback]), callback.state_dict()

    def find(state):
        return find_odd_callback({callback.state_key: state}, trainer, {}, 0)

    assert find(state) is None
    for value in values:
        assert callback.state_key in find({**state, key: value})
    for other in ({}, "x", {**state, "more": 1}):
        assert find(other)


def test_weights_beside_an_average_are_finite(saved, run_from):
    path = ("trained_weights", "model.heads.0.bias")
    value = torch.full_like(get(saved("ema_decay=0.9"), path), torch.nan)
    with pytest.raises(UsageError, match=r"heads\.0\.bias contains NaN or infinite values"):
        run_from(change(saved("ema_decay=0.9"), path, value), None, "ema_decay=0.9")


def assert_equal_runs(a, b):
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_changed_value_is_refused_or_changes_nothing(saved, run_from, data):
    content, unchanged = saved(), saved("trainer.max_steps=2")
    paths = [path for path in iter_paths(content) if path[0] != "unet3d"]
    path = data.draw(st.sampled_from(paths))
    value = get(content, path)
    if isinstance(value, torch.Tensor):
        value = TENSORS[data.draw(st.sampled_from(sorted(TENSORS)))](value)
    else:
        value = data.draw(st.sampled_from(VALUES))
    try:
        result = run_from(change(content, path, value), 2)
    except UsageError as error:
        result = str(error)
    if isinstance(result, str):
        assert "\n" not in result
    else:
        assert_equal_runs(result, unchanged)


def test_a_value_that_is_missing_is_named_or_not_needed(saved, run_from):
    refused = {}
    paths = [path for path in iter_paths(saved()) if len(path) < 4]
    for path in [path for path in paths if path[0] not in ("state_dict", "unet3d")]:
        try:
            run_from(remove(saved(), path), None)
        except UsageError as error:
            refused[path] = str(error)
    assert all("x.ckpt" in message for message in refused.values())
    assert ("callbacks", "StoppingLimits") in refused
    assert ("callbacks", "TrainingWarnings") not in refused


def test_every_value_may_be_any_other_without_another_error(saved, run_from):
    paths = [(path, value) for path in iter_paths(saved()) for value in VALUES]
    for path, value in random.Random(0).sample(paths, 200):
        with suppress(UsageError):
            run_from(change(saved(), path, value), None)
