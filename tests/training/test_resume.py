"""An interrupted and resumed run ends like an uninterrupted one, bit for bit."""

import gc
import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensorboard.summary.writer import event_file_writer
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.contract.helpers.runs import read_events
from tests.helpers.training import fit
from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.config.compose import list_options
from unet3d.errors import Interrupted
from unet3d.signals import SignalListener
from unet3d.training.start import prepare_start

pytestmark = pytest.mark.slow

LONG = [
    *("data.layout.num_cases=8", "trainer.max_steps=7", "data.num_workers=0"),
    "callbacks.case_images.cases=0",  # drawing them takes a fifth of the time
]
"""Three steps per epoch: the run ends within the third epoch."""


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch):
    """TensorBoard sorts files of the same second and process by name, where 100 is before 99."""
    counter = event_file_writer.AtomicCounter(1000)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


class At(Callback):
    """Act once in a hook, after a number of calls of it."""

    def __init__(self, hook, calls, act):
        self.calls, self.act = calls, act
        setattr(self, hook, self._on_call)

    def _on_call(self, trainer, *_):
        if trainer.sanity_checking:
            return
        if self.calls == 0:
            self.act()
        self.calls -= 1


def send_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def train(settings, folder, *callbacks):
    """Train from the folder's last checkpoint; return the run and whether it has finished."""
    with SignalListener().listening() as signals:
        run = build_training(settings, folder, signals)
        run.trainer.callbacks[:0] = callbacks
        try:
            fit(run, prepare_start(run).checkpoint, signals)
        except Interrupted:
            return run, False
        return run, True


def read_results(folder):
    """Return the checkpoints of a run without what may differ, and its curves in TensorBoard."""
    log, curves, contents = read_events(folder), {}, {}
    for tag in log.Tags()["scalars"]:
        if tag.startswith(("train/", "val/")):
            curves[tag] = [(s.step, s.value) for s in log.Scalars(tag)]
        elif tag.startswith(("memory/step_", "speed/")):  # a phase can be too short for a sample
            curves[tag] = [s.step for s in log.Scalars(tag)]
    for name in ("last", "best"):
        content = load_checkpoint(folder / "checkpoints" / f"{name}.ckpt")
        content["loops"] = content["loops"]["fit_loop"]["state_dict"]
        del content["callbacks"]["StoppingLimits"], content["unet3d"]
        contents[name] = content
    return contents, dict(sorted(curves.items()))


def assert_same(a, b):
    """Compare nested values, and tensors bit for bit."""
    (values, structure), (others, other_structure) = map(tree_flatten_with_path, (a, b))
    assert structure == other_structure
    for (where, x), (_, y) in zip(values, others, strict=True):
        assert x.equal(y) if isinstance(x, torch.Tensor) else x == y, keystr(where)


OPTIMIZERS = [name for name in list_options("optimizer") if name != "adamw"]
SCHEDULERS = [n for n in list_options("scheduler") if n not in ("poly", "one_cycle", "plateau")]
"""Every optimizer and every schedule but those that tests/contract resumes."""
OFTEN = {"step": ["scheduler.step_size=2"], "warm_restarts": ["scheduler.T_0=2"]}
"""Options of schedules that change nothing in a run of a few steps by default."""


class Halve:
    """Halves the rate with each step."""

    def __call__(self, step):
        return 0.5**step


OF_THE_USER = [
    *("scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.LambdaLR"),
    *("~scheduler.step_size", "~scheduler.gamma"),
    "+scheduler.lr_lambda={_target_:tests.training.test_resume.Halve}",
]


def list_schedules():
    """Return the options of runs: run k takes optimizer k and schedule k, over and over."""
    factors = ["head_warmup=0.6", "lr_factors={encoder:0.1,encoder.0:0.5}"]
    for n in range(max(len(OPTIMIZERS), len(SCHEDULERS))):
        optimizer, schedule = OPTIMIZERS[n % len(OPTIMIZERS)], SCHEDULERS[n % len(SCHEDULERS)]
        choices = [f"optimizer={optimizer}", f"scheduler={schedule}"]
        yield [*choices, *OFTEN.get(schedule, []), *factors]


@pytest.mark.parametrize(
    ("hook", "calls", "options"),
    [
        ("on_train_batch_end", 3, ["trainer.max_steps=null", "trainer.max_epochs=2"]),
        # Every second epoch, and at the end of the run, within the fourth.
        ("on_train_batch_end", 9, ["trainer.check_val_every_n_epoch=2", "trainer.max_steps=10"]),
        ("on_validation_batch_end", 0, ["ema_decay=0.8", "model.norm=batch"]),
        ("on_train_batch_end", 3, OF_THE_USER),
        *(("on_train_batch_end", 3, options) for options in list_schedules()),
    ],
    ids=str,
)
def test_a_run_resumes_exactly_with_any_options(composed, tmp_path, hook, calls, options):
    settings = composed(*LONG, "resume=auto", *options)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = [train(settings, whole), train(settings, stopped, At(hook, calls, send_sigterm))]
    done.append(train(settings, stopped))
    assert [is_done for _, is_done in done] == [True, False, True]
    assert_same(read_results(whole), read_results(stopped))


def test_a_raised_limit_cancels_the_pending_last_validation(composed, tmp_path):
    train(composed(*LONG), tmp_path, At("on_validation_start", 2, send_sigterm))  # at its last step
    run, done = train(composed(*LONG, "trainer.max_steps=9", "resume=auto"), tmp_path)
    assert done
    assert run.data.train_loader.state_dict() == {"epoch": 2, "batch": 3}
    assert [step for step, _ in read_results(tmp_path)[1]["val/dice"]] == [2, 5, 8]


def tensor_storages():
    """Return the bytes of every tensor storage in this process by address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    real = [x for x in tensors if not isinstance(x, FakeTensor)]  # those of the memory estimate
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in real}


def test_a_step_after_a_resume_starts_with_as_much_memory_as_without_one(composed, tmp_path):
    """A checkpoint that stays in memory is a second network and would raise the peak."""

    def allocated_at_step_4(folder, before):
        allocated = []

        def measure():
            storages = tensor_storages()
            allocated.append(sum(n for p, n in storages.items() if p not in before))

        calls = 0 if (folder / "checkpoints").exists() else 3
        settings = composed(*LONG, "resume=auto")
        train(settings, folder, At("on_train_batch_start", calls, measure))
        return allocated

    uninterrupted = allocated_at_step_4(tmp_path / "uninterrupted", tensor_storages())
    stopped = tmp_path / "stopped"
    train(composed(*LONG), stopped, At("on_train_batch_end", 2, send_sigterm))
    # 2 KiB: logged values
    assert allocated_at_step_4(stopped, tensor_storages()) == pytest.approx(uninterrupted, abs=2048)
