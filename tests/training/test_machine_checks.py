import shutil
from pathlib import Path

from unet3d.text import GIB, MIB
from unet3d.training.machine_checks import (
    check_disk,
    check_shm,
    check_torch_build,
    check_writable,
)


def test_a_small_dev_shm_stops_a_run_with_workers_and_says_what_to_do():
    problem = check_shm(workers=8, processes=1, batch=100 * MIB, free=64 * MIB)
    assert problem.is_fatal
    assert "64 MiB left" in problem.message
    assert "batches of 8 workers need 1.6 GiB" in problem.message
    assert "--shm-size=2g" in problem.message
    assert "data.num_workers=0" in problem.message
    assert check_shm(workers=8, processes=1, batch=4 * MIB, free=64 * MIB) is None
    assert check_shm(workers=8, processes=1, batch=GIB, free=None) is None


def test_the_workers_of_all_processes_on_a_machine_are_counted():
    problem = check_shm(workers=2, processes=4, batch=100 * MIB, free=GIB)
    assert "4 x 2 workers need 1.6 GiB" in problem.message
    assert check_shm(workers=2, processes=2, batch=100 * MIB, free=GIB) is None


def test_a_disk_too_small_for_the_checkpoints_stops_the_run(tmp_path, monkeypatch):
    def set_free(nbytes):
        usage = type(shutil.disk_usage(tmp_path))(0, 0, nbytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    folder = tmp_path / "run" / "checkpoints"
    set_free(3 * MIB)
    problem = check_disk(folder, checkpoint=MIB)
    assert problem.is_fatal
    assert "3 MiB left, but checkpoints need 4 MiB" in problem.message
    folder.mkdir(parents=True)
    (folder / "last.ckpt").write_bytes(bytes(MIB))  # will be replaced
    assert check_disk(folder, checkpoint=MIB) is None


def test_a_folder_that_is_not_writable_is_reported_before_it_is_needed(tmp_path):
    assert check_writable(tmp_path / "not" / "there") is None
    problem = check_writable(Path("/proc/self/not/there"))
    assert problem.is_fatal
    assert "/proc/self is not writable" in problem.message


def test_a_gpu_that_torch_does_not_find_is_reported():
    def message(cuda, devices):
        problem = check_torch_build("2.13", cuda=cuda, devices=devices)
        return problem and problem.message

    devices = [Path("/dev/nvidia0")]
    assert "finds no GPU" in message("12.8", devices)
    assert "built without CUDA" in message(None, devices)
    assert message("12.8", []) is None
