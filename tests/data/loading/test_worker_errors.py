import multiprocessing
import os
import re
import signal
from types import SimpleNamespace

import pytest
from torch.utils.data._utils import signal_handling

from tests.data.helpers.loaders import load_epochs, make_loader
from unet3d.data.loading.loaders import collate
from unet3d.data.loading.worker_errors import (
    SampleError,
    end_workers_on_error,
    explain_worker_error,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def restore_sigchld_handler(monkeypatch):
    """Let torch set its SIGCHLD handler again, which Lightning removes when another test ends."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)


def catch(loader, kind=Exception):
    """Return the error that the loader raises, and its explanation."""
    try:
        load_epochs(loader, 0, 1, 2)
    except kind as raised:
        error = raised
    in_flight = [loader.dataset.in_flight]
    explanation = explain_worker_error(error, in_flight, num_workers=loader.num_workers)
    # The traceback would keep the loader alive in a cycle, and its collection waits for workers.
    return error.with_traceback(None), explanation


def make_failing_loader(volumes, fail):
    """Make a loader whose worker fails, or kills its process, when it augments."""
    augment = SimpleNamespace(sample_transform=lambda *_: fail())
    return make_loader(volumes, num_workers=1, augment=augment)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_is_lost_or_truncated_is_reported_with_its_case(volumes, num_workers):
    for damage in (lambda file: os.truncate(file, 400), os.remove):
        damage(volumes[1].folder / "image.npy")
        _, explanation = catch(make_loader(volumes, num_workers=num_workers), SampleError)
        pattern = (
            r"case1: ValueError: .*image\.npy cannot be read \(.*\): restart the run to make it"
        )
        assert re.fullmatch(pattern, str(explanation))


def test_an_exception_in_a_worker_is_one_line_and_its_traceback_is_kept(volumes):
    def fail():
        raise ValueError("more\nthan one line")

    error, explanation = catch(make_failing_loader(volumes, fail), SampleError)
    assert str(explanation) in [f"case{n}: ValueError: more than one line" for n in range(3)]
    assert "in fail" in str(error)


def crash_with_sigbus():
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGBUS)


def test_a_crash_because_shared_memory_is_full_is_reported_with_its_case(volumes):
    _, explanation = catch(make_failing_loader(volumes, crash_with_sigbus), RuntimeError)
    pattern = r"a data worker \(last case: case\d\) crashed with SIGBUS: /dev/shm is full"
    assert re.match(pattern, str(explanation))


def test_full_shared_memory_is_reported_with_the_fix_and_other_errors_are_not():
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>")
    assert "--shm-size=8g" in str(explain_worker_error(error, [], num_workers=1))
    assert explain_worker_error(RuntimeError("mat1 and mat2"), [], num_workers=1) is None


def test_deferred_contexts_are_moved_to_shared_memory_by_collate(volumes):
    """If /dev/shm is full, this raises; later, in the queue's thread, the run would hang."""

    def collate_and_report(samples):
        batch = collate(samples)
        return batch | {"case": [batch["image"].is_shared(), batch["label"].is_shared()]}

    loader = make_loader(volumes, num_workers=1, defer=True)
    loader.collate_fn = collate_and_report
    assert [batch["case"] for batch in loader] == [[True, True]] * 3


def test_workers_that_hang_and_ignore_signals_end_with_an_error(volumes):
    workers = []

    def stop_worker():
        batches = iter(make_loader(volumes, num_workers=1))
        next(batches)
        workers.extend(multiprocessing.active_children())
        os.kill(workers[0].pid, signal.SIGSTOP)
        raise KeyError

    with pytest.raises(KeyError), end_workers_on_error():
        stop_worker()
    assert workers[0].exitcode == -signal.SIGKILL
