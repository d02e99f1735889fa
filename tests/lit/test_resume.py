"""A run that was stopped and goes on ends as if it had never stopped, bit for bit."""

import gc
import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch._subclasses.fake_tensor import FakeTensor

from unet3d.cli.train import fit_model
from unet3d.errors import Interrupted, UsageError
from unet3d.lit.callbacks.checkpoints import PREVIOUS, LastCheckpoint
from unet3d.lit.callbacks.preemption import SignalListener
from unet3d.lit.resume import load_checkpoint
from unet3d.workflows.training.build import build_training, resolve_start

LONG = ["data.source.num_cases=8", "trainer.max_steps=7", "data.num_workers=0"]
"""Three steps an epoch: the run ends within its third one."""


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch):
    """TensorBoard reads the files of one second and process by name, and 100 comes before 99."""
    counter = event_file_writer.AtomicCounter(1000)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


class At(Callback):
    """Does something at one moment of a run: (hook, how many calls of it come first)."""

    def __init__(self, hook, calls, act):
        self.calls, self.act = calls, act
        setattr(self, hook, self._called)

    def _called(self, trainer, *_):
        if trainer.sanity_checking:
            return
        if self.calls == 0:
            self.act()
        self.calls -= 1


def term():
    os.kill(os.getpid(), signal.SIGTERM)


def broken():
    raise RuntimeError("as if it had been killed")


def go(request, folder, *callbacks):
    """Train on from whatever is in the folder; False if the run was stopped."""
    with SignalListener().listening() as signals:
        run = build_training(request, folder, signals)
        run.trainer.callbacks[:0] = callbacks
        checkpoint, _ = resolve_start(run)
        if checkpoint is not None and run.finished(checkpoint):
            return run, True
        try:
            fit_model(run, checkpoint, signals)
        except (Interrupted, RuntimeError):
            return run, False
        return run, True


def left(folder):
    """All that a run leaves for the next one, and what TensorBoard shows."""
    log = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    log.Reload()
    curves = {}
    for tag in log.Tags()["scalars"]:
        if tag.startswith(("train/", "val/")):
            curves[tag] = [(s.step, s.value) for s in log.Scalars(tag)]
        elif tag.startswith(("memory/step_", "speed/")):  # a phase may be too short to be sampled
            curves[tag] = [s.step for s in log.Scalars(tag)]
    contents = {}
    for name in ("last", "best"):
        content = load_checkpoint(folder / "checkpoints" / f"{name}.ckpt")
        position = content["callbacks"]["Position"]
        contents[name] = (
            content["state_dict"],
            content["optimizer_states"],
            position,
            content["callbacks"]["BestCheckpoint"],
            content["callbacks"]["TrainingHealth"],
            content["global_step"],
        )
    return contents, dict(sorted(curves.items()))


def same(a, b, where=""):
    """Compare nested values, tensors bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.equal(b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{n}]")
    else:
        assert a == b, where


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, small):
    """The same run without a stop, made once for each list of options."""
    from unet3d.config.compose import compose_config

    found = {}

    def made(*options):
        if options not in found:
            folder = tmp_path_factory.mktemp("uninterrupted")
            _, done = go(compose_config([*small, *LONG, *options], "train"), folder)
            assert done
            found[options] = left(folder)
        return found[options]

    return made


BATCHES = [("on_train_batch_end", n) for n in (0, 2, 4, 6)]
VALIDATIONS = [("on_validation_start", 1), ("on_validation_batch_end", 0)]
MOMENTS = [*BATCHES, ("on_validation_start", 0), ("on_validation_batch_end", 1)]


def name(value):
    return "-".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize("moment", [*MOMENTS, *VALIDATIONS], ids=name)
def test_stopped_by_a_signal(composed, tmp_path, uninterrupted, moment):
    request = composed(*LONG, "resume=auto")
    _, done = go(request, tmp_path, At(*moment, term))
    assert not done
    _, done = go(request, tmp_path)
    assert done
    same(uninterrupted(), left(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        ["trainer.accumulate_grad_batches=2", "data.batch_size=1", "trainer.max_steps=5"],
        ["data.num_workers=2"],
        ["model.norm=batch"],
        ["model=dynunet", "+model.dropout=0.2"],
        ["trainer.max_steps=null", "trainer.max_epochs=2"],
        ["trainer.check_val_every_n_epoch=2", "fold=1"],
        ["precision=bf16-true"],
    ],
    ids=["accumulation", "workers", "batch_norm", "dropout", "epochs", "rare", "pure_half"],
)
@pytest.mark.parametrize("moment", [("on_train_batch_end", 3)], ids=name)
def test_stopped_by_a_signal_whatever_the_run(composed, tmp_path, uninterrupted, options, moment):
    request = composed(*LONG, "resume=auto", *options)
    _, done = go(request, tmp_path, At(*moment, term))
    assert not done
    _, done = go(request, tmp_path)
    assert done
    same(uninterrupted(*options), left(tmp_path))


@pytest.mark.parametrize("seconds", [0, 60], ids=["saved_each_step", "never_saved"])
@pytest.mark.parametrize("moment", [("on_before_optimizer_step", n) for n in (1, 5)], ids=name)
def test_killed_and_taken_up_from_an_earlier_checkpoint(
    composed, tmp_path, uninterrupted, moment, seconds, monkeypatch
):
    """TensorBoard has already seen later steps, and does not show them twice."""
    monkeypatch.setattr(LastCheckpoint, "on_exception", lambda *_: None)
    request = composed(*LONG, "resume=auto", f"save_every_seconds={seconds}")
    _, done = go(request, tmp_path, At(*moment, broken))
    assert not done
    assert (tmp_path / "checkpoints" / "last.ckpt").exists() == (seconds == 0)
    _, done = go(request, tmp_path)
    assert done
    same(uninterrupted(), left(tmp_path))


@pytest.mark.parametrize("first", [True, False], ids=["before the others", "after the others"])
def test_what_breaks_between_a_step_and_its_place_in_the_curves_leaves_no_gap(
    composed, tmp_path, uninterrupted, first
):
    """As a rank does that waits in vain for another one there."""
    request = composed(*LONG, "resume=auto")
    with SignalListener().listening() as signals:
        run = build_training(request, tmp_path, signals)
        place = 0 if first else len(run.trainer.callbacks)
        run.trainer.callbacks.insert(place, At("on_train_batch_end", 4, broken))
        with pytest.raises(RuntimeError):
            fit_model(run, None, signals)
    _, done = go(request, tmp_path)
    assert done
    same(uninterrupted(), left(tmp_path))


@pytest.mark.parametrize(
    "moment",
    [("on_train_batch_end", 5), ("on_train_batch_end", 9)],
    ids=name,
)
def test_validations_stay_as_rare_as_they_were(composed, tmp_path, uninterrupted, moment):
    """Every second epoch, and at the end, which is within the fourth."""
    options = ["trainer.check_val_every_n_epoch=2", "trainer.max_steps=10"]
    request = composed(*LONG, "resume=auto", *options)
    _, done = go(request, tmp_path, At(*moment, term))
    assert not done
    _, done = go(request, tmp_path)
    assert done
    same(uninterrupted(*options), left(tmp_path))


def test_a_limit_that_is_raised_has_no_last_validation_any_more(composed, tmp_path):
    go(composed(*LONG), tmp_path, At("on_validation_start", 2, term))  # at its seventh step
    seen = []
    longer = composed(*LONG, "trainer.max_steps=9", "resume=auto")
    run, done = go(longer, tmp_path, At("on_train_batch_start", 0, lambda: seen.append("batch")))
    assert done
    assert (run.position.epoch, run.position.batch) == (2, 3)
    assert [step for step, _ in left(tmp_path)[1]["val/dice"]] == [2, 5, 8]


def test_stopped_again_and_again(composed, tmp_path, uninterrupted):
    request = composed(*LONG, "resume=auto")
    for _ in range(20):
        _, done = go(request, tmp_path, At("on_train_batch_end", 0, term))
        if done:
            break
    assert done
    same(uninterrupted(), left(tmp_path))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_taken(
    composed, tmp_path, uninterrupted
):
    request = composed(*LONG, "resume=auto")
    go(request, tmp_path, At("on_train_batch_end", 1, term))
    go(request, tmp_path, At("on_train_batch_end", 1, term))
    last = tmp_path / "checkpoints" / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    assert (last.parent / PREVIOUS).exists()
    _, done = go(request, tmp_path)
    assert done
    same(uninterrupted(), left(tmp_path))
    assert (last.parent / "damaged.ckpt").read_bytes() == content


@pytest.mark.parametrize(
    "change", ["seed=1", "data.batch_size=1", "data.patches_per_case=2"], ids=str
)
def test_a_run_that_counts_otherwise_is_not_taken_up(composed, tmp_path, change):
    go(composed(*LONG), tmp_path, At("on_train_batch_end", 1, term))
    with pytest.raises(UsageError, match="use init_from="):
        go(composed(*LONG, "resume=auto", change), tmp_path)


def living():
    """Every tensor's memory in this process: address -> bytes."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    real = [x for x in tensors if not isinstance(x, FakeTensor)]  # a prediction's, that is kept
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in real}


def test_a_step_after_a_resume_begins_with_as_much_memory_as_it_would_have(composed, tmp_path):
    """Else its peak would be another one: a checkpoint that stays loaded is a second network."""

    def at_step(folder, before, *callbacks):
        seen = []
        counted = At(
            "on_train_batch_start",
            0 if (folder / "checkpoints").exists() else 3,
            lambda: seen.append(sum(n for p, n in living().items() if p not in before)),
        )
        request = composed(*LONG, "resume=auto")
        go(request, folder, counted, *callbacks)
        return seen

    whole = at_step(tmp_path / "whole", living())
    stopped = tmp_path / "stopped"
    go(composed(*LONG), stopped, At("on_train_batch_end", 2, term))
    assert at_step(stopped, living()) == pytest.approx(whole, abs=2048)  # of logged figures
