import multiprocessing
import os
import signal
import time
import traceback

import pytest
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling

from tests.data.helpers.loaders import load_epochs, make_loader
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading import worker_errors
from unet3d.data.loading.datasets import ValidationVolumes
from unet3d.data.loading.loaders import collate
from unet3d.data.loading.worker_errors import (
    SampleError,
    end_workers_on_error,
    explain_worker_error,
)
from unet3d.errors import RunError

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
    explanation = explain_worker_error(
        error,
        [loader.dataset.in_flight],
        num_workers=loader.num_workers,
        kills_before=loader.oom_kills,
    )
    # The traceback would keep the loader alive in a cycle, and its collection waits for workers.
    return error.with_traceback(None), explanation


class FailingAugment:
    """An augmentation that fails or kills its process."""

    def __init__(self, fail):
        self.fail = fail

    def sample_transform(self, augmentation_seed, size):
        self.fail()


def make_failing_loader(volumes, fail):
    return make_loader(volumes, num_workers=1, augment=FailingAugment(fail))


@pytest.mark.parametrize(
    ("num_workers", "name", "defer"),
    [(0, "image", False), (0, "label", True), (0, "foreground_points", False), (1, "image", True)],
)
def test_a_missing_file_is_reported_with_its_case(volumes, num_workers, name, defer):
    (volumes[1].folder / f"{name}.npy").unlink()
    error, _ = catch(make_loader(volumes, num_workers=num_workers, defer=defer), SampleError)
    path = volumes[1].folder / f"{name}.npy"
    assert str(error) == (
        f"case1: {name}.npy is missing; remove {path.parent} and restart the run to regenerate it"
    )


@pytest.mark.parametrize(("num_workers", "size"), [(0, 0), (0, 60), (0, 400), (1, 400)])
def test_a_truncated_file_is_reported_with_its_case(volumes, num_workers, size):
    path = volumes[2].folder / "image.npy"
    os.truncate(path, size)
    error, _ = catch(make_loader(volumes, num_workers=num_workers), SampleError)
    assert str(error).startswith("case2: image.npy cannot be read")
    assert str(error).endswith(f"remove {path.parent} and restart the run to regenerate it")
    assert "\n" not in str(error)


def test_a_flipped_bit_is_reported_with_its_case(volumes):
    """A checksum is compared when a volume is first read."""
    path = volumes[2].folder / "image.npy"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    error, _ = catch(make_loader(volumes, num_workers=1), SampleError)
    assert str(error).startswith("case2: image.npy does not have its checksum; remove ")


def test_a_volume_is_verified_once_by_all_workers(volumes, monkeypatch):
    loader = make_loader(volumes, num_workers=2)
    load_epochs(loader, 0, 1)
    assert list(loader.patches.in_flight.verified) == [1, 1, 1]
    monkeypatch.setattr(worker_errors, "verify_arrays", lambda folder: pytest.fail("read again"))
    assert loader.patches[(9, 0, False)]["case"] == "case0"


def test_a_missing_file_of_a_validation_volume_is_reported_with_its_case(volumes):
    (volumes[0].folder / "label.npy").unlink()
    with pytest.raises(SampleError, match=r"case0: .*missing"):
        ValidationVolumes(volumes)[0]


def test_an_exception_in_a_worker_is_one_line_with_its_traceback_as_a_note(volumes):
    def fail():
        raise ValueError("more\nthan one line")

    error, _ = catch(make_failing_loader(volumes, fail), SampleError)
    assert str(error) in [f"case{n}: ValueError: more than one line" for n in range(3)]
    assert "in sample_transform" in "".join(traceback.format_exception(error))


def test_an_exception_while_collating_is_one_line(volumes):
    def fail(samples):
        raise KeyError("image")

    loader = make_loader(volumes, num_workers=1)
    loader.collate_fn = fail
    _, explanation = catch(loader, KeyError)
    assert str(explanation) == "a data worker failed: KeyError: 'image'"


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_worker_is_reported_with_its_case_and_whether_memory_ran_out(
    volumes,
    kills,
    tmp_path,
    monkeypatch,
):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 4\noom_group_kill 0\n")
    monkeypatch.setattr(worker_errors, "OOM_COUNTERS", (tmp_path / "none", counter))
    loader = make_failing_loader(volumes, lambda: os.kill(os.getpid(), signal.SIGKILL))
    counter.write_text(f"low 0\noom 3\noom_kill {4 + kills}\noom_group_kill 0\n")
    _, explanation = catch(loader, RuntimeError)
    assert str(explanation).startswith("a data worker (last case: case")
    cause = "the container ran out of memory" if kills else "killed by SIGKILL"
    assert cause in str(explanation)
    assert "lower data.num_workers (now 1)" in str(explanation)


def crash_with_sigbus():
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGBUS)


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (crash_with_sigbus, "crashed with SIGBUS: /dev/shm is full"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR2), "was killed by SIGUSR2"),
        (lambda: os._exit(7), "exited; rerun with data.num_workers=0 to see why"),
    ],
)
def test_other_signals_and_exit_codes_are_reported(volumes, fail, cause):
    _, explanation = catch(make_failing_loader(volumes, fail), RuntimeError)
    assert cause in str(explanation)


def explain(reason):
    text = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback ...\n"
    error = RuntimeError(f"{text}RuntimeError: {reason}")
    explanation = explain_worker_error(error, [], num_workers=1, kills_before=0)
    assert isinstance(explanation, RunError)
    return str(explanation)


def test_full_or_missing_shared_memory_is_reported_with_the_fix(tmp_path, monkeypatch):
    full = explain("unable to allocate shared memory(shm) for file </torch_1>: No space left")
    assert "--shm-size=8g" in full
    monkeypatch.setattr(worker_errors, "SHARED_MEMORY", tmp_path / "shm")
    missing = explain("unable to open shared memory object </torch_1> in read-write mode: No such")
    assert f"there is no {tmp_path / 'shm'}: lower data.num_workers (0 needs none)" in missing


def test_without_shared_memory_samples_are_made_in_the_training_process(volumes, monkeypatch):
    def fail(kind, size):
        raise FileNotFoundError("/dev/shm")

    monkeypatch.setattr(worker_errors, "RawArray", fail)
    assert len(load_epochs(make_loader(volumes), 0)) == 3


def test_an_error_that_is_not_about_workers_is_not_explained():
    error = RuntimeError("mat1 and mat2")
    assert explain_worker_error(error, [], num_workers=1, kills_before=0) is None


def test_deferred_contexts_are_moved_to_shared_memory_by_collate(volumes):
    """If /dev/shm is full, this raises; later, in the queue's thread, the run would hang."""

    def collate_and_report(samples):
        batch = collate(samples)
        return batch | {"case": [batch["image"].is_shared(), batch["label"].is_shared()]}

    loader = make_loader(volumes, num_workers=1, defer=True)
    loader.collate_fn = collate_and_report
    assert [batch["case"] for batch in loader] == [[True, True]] * 3


def test_a_run_with_a_killed_worker_ends_with_one_line_and_exit_code_4(unet3d, capsys, monkeypatch):
    def die(self, augmentation_seed, size):
        assert get_worker_info() is not None
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Augment, "sample_transform", die)
    assert unet3d("data.num_workers=2") == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("unet3d: a data worker (last case: case_0")


def test_a_run_with_a_deleted_cache_ends_with_one_line_and_exit_code_4(
    unet3d, tmp_path, capsys, monkeypatch
):
    from unet3d.training.module import SegmentationModule

    original = SegmentationModule.training_step

    def delete_cache(self, batch, batch_idx):
        for path in (tmp_path / "cache").rglob("image.npy"):
            path.unlink()
        return original(self, batch, batch_idx)

    monkeypatch.setattr(SegmentationModule, "training_step", delete_cache)
    assert unet3d("trainer.max_steps=9", f"data.cache={tmp_path / 'cache'}") == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "unet3d: case_00" in line
    assert "image.npy is missing" in line


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


def test_processes_that_the_block_did_not_start_live_on(volumes):
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    with pytest.raises(KeyError), end_workers_on_error():
        raise KeyError
    assert other.is_alive()
    other.kill()
    other.join()
