import os
import signal
import traceback

import pytest
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling

from tests.data.loading.test_loaders import epochs, feed
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading import worker_errors
from unet3d.data.loading.datasets import ValidationVolumes, get_classes
from unet3d.data.loading.loaders import collate
from unet3d.data.loading.worker_errors import SampleError, explain_worker_error
from unet3d.errors import RunError


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """Torch sets its SIGCHLD handler once, and Lightning takes it away as another test ends."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)


def met(loader, kind=Exception):
    """What comes out of the loader, and what we make of it."""
    try:
        epochs(loader, 0, 1, 2)
    except kind as error:
        met = error
    given = {"num_workers": loader.num_workers, "kills_before": loader.oom_kills}
    fault = explain_worker_error(met, [loader.dataset.making], **given)
    # Else the loader lives on in a cycle, and whoever collects it waits for its workers.
    return met.with_traceback(None), fault


class Dies:
    """An augmentation that ends its own process."""

    def __init__(self, how):
        self.how = how

    def sample_transform(self, key, size):
        self.how()


def dying(volumes, how):
    return feed(volumes, num_workers=1, augment=Dies(how))


@pytest.mark.parametrize(
    ("num_workers", "name", "later"),
    [(0, "image", False), (0, "label", True), (0, "places", False), (1, "image", True)],
)
def test_a_file_that_vanished_is_named_with_its_case(volumes, num_workers, name, later):
    (volumes[1].folder / f"{name}.npy").unlink()
    error, _ = met(feed(volumes, num_workers=num_workers, later=later), SampleError)
    assert str(error).startswith(f"case1: {volumes[1].folder}/{name}.npy is gone: start again")


@pytest.mark.parametrize(("num_workers", "left"), [(0, 0), (0, 60), (0, 400), (1, 400)])
def test_a_file_that_was_cut_off_is_named_with_its_case(volumes, num_workers, left):
    path = volumes[2].folder / "image.npy"
    os.truncate(path, left)
    error, _ = met(feed(volumes, num_workers=num_workers), SampleError)
    assert str(error).startswith(f"case2: {path} cannot be read")
    assert str(error).endswith(f"remove {path.parent} and start again, and it is prepared anew")
    assert "\n" not in str(error)


def test_whole_volumes_name_their_case_too(volumes):
    (volumes[0].folder / "label.npy").unlink()
    with pytest.raises(SampleError, match=r"case0: .*gone"):
        ValidationVolumes(volumes)[0]


def test_the_classes_of_volumes_are_read_and_a_file_that_vanished_is_named(volumes):
    assert get_classes(volumes) == [{1, 2}] * 3
    (volumes[1].folder / "places.npy").unlink()
    with pytest.raises(SampleError, match=r"case1: .*gone"):
        get_classes(volumes)


def test_an_exception_in_a_worker_is_one_line_and_its_traceback_a_note(volumes):
    def fails():
        raise ValueError("more\nthan one line")

    error, _ = met(dying(volumes, fails), SampleError)
    assert str(error) in [f"case{n}: ValueError: more than one line" for n in range(3)]
    assert "in move" in "".join(traceback.format_exception(error))


def test_an_exception_between_samples_is_one_line(volumes):
    def breaks(samples):
        raise KeyError("image")

    loader = feed(volumes, num_workers=1)
    loader.collate_fn = breaks
    _, fault = met(loader, KeyError)
    assert str(fault) == "a data worker failed: KeyError: 'image'"


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_worker_names_its_case_and_whether_memory_ran_out(
    volumes,
    kills,
    tmp_path,
    monkeypatch,
):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 4\noom_group_kill 0\n")
    monkeypatch.setattr(worker_errors, "OOM_COUNTERS", (tmp_path / "none", counter))
    loader = dying(volumes, lambda: os.kill(os.getpid(), signal.SIGKILL))
    counter.write_text(f"low 0\noom 3\noom_kill {4 + kills}\noom_group_kill 0\n")
    _, fault = met(loader, RuntimeError)
    assert str(fault).startswith("a data worker (the last case it began: case")
    said = "the container's memory ran out" if kills else "from outside (SIGKILL)"
    assert said in str(fault)
    assert "data.num_workers (now 1)" in str(fault)


def test_a_bus_error_is_blamed_on_a_file_that_was_cut_off_or_on_shared_memory(volumes):
    def bus():
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGBUS)

    _, fault = met(dying(volumes, bus), RuntimeError)
    assert "/dev/shm is full" in str(fault)
    assert "--shm-size" in str(fault)

    def cut():
        for volume in volumes:
            os.truncate(volume.folder / "label.npy", 200)
        bus()

    _, fault = met(dying(volumes, cut), RuntimeError)
    assert "label.npy cannot be read" in str(fault)


def test_other_signals_and_exit_codes_are_named(volumes):
    _, fault = met(dying(volumes, lambda: os.kill(os.getpid(), signal.SIGUSR2)), RuntimeError)
    assert "was ended by SIGUSR2" in str(fault)
    _, fault = met(dying(volumes, lambda: os._exit(7)), RuntimeError)
    assert "ended with exit code 7; data.num_workers=0" in str(fault)


def test_no_shared_memory_says_what_helps(volumes):
    error = RuntimeError(
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback ...\n"
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left"
    )
    fault = explain_worker_error(error, [], num_workers=1, kills_before=0)
    assert "--shm-size=8g" in str(fault)
    assert (
        explain_worker_error(RuntimeError("mat1 and mat2"), [], num_workers=1, kills_before=0)
        is None
    )
    assert isinstance(fault, RunError)


def test_sources_for_a_gpu_are_shared_where_an_error_is_raised_and_not_behind_it(volumes):
    """In the queue's thread torch would print a traceback, and the run would wait for ever."""

    def tells(samples):
        batch = collate(samples)
        return batch | {"case": [batch["image"].is_shared(), batch["label"].is_shared()]}

    loader = feed(volumes, num_workers=1, later=True)
    loader.collate_fn = tells
    assert [batch["case"] for batch in loader] == [[True, True]] * 3


def test_a_run_whose_worker_is_killed_ends_with_one_line_and_code_4(unet3d, capsys, monkeypatch):
    def killed(self, key, size):
        assert get_worker_info() is not None
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Augment, "move", killed)
    assert unet3d("data.num_workers=2") == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("unet3d: a data worker (the last case it began: case_0")


def test_a_cache_that_vanishes_while_training_ends_with_one_line_and_code_4(
    unet3d, tmp_path, capsys, monkeypatch
):
    from unet3d.lit.module import SegmentationModule

    original = SegmentationModule.training_step

    def vanishes(self, batch, batch_idx):
        for path in (tmp_path / "cache").rglob("image.npy"):
            path.unlink()
        return original(self, batch, batch_idx)

    monkeypatch.setattr(SegmentationModule, "training_step", vanishes)
    assert unet3d("trainer.max_steps=9", f"data.cache={tmp_path / 'cache'}") == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "unet3d: case_00" in line
    assert "image.npy is gone" in line


def test_making_notes_cost_less_than_a_hundredth_of_a_small_patch(volumes):
    import time

    patches = feed(volumes).patches

    def fastest(work):
        times = []
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(50):
                work()
            times.append(time.perf_counter() - begun)
        return min(times)

    def note():
        with patches.making(0):
            pass

    assert fastest(note) < 0.05 * fastest(lambda: patches[(0, 0, False)])
