import multiprocessing
import resource
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from unet3d.kernel_cache import get_kernel_cache, get_triton_cache
from unet3d.machine import preflight
from unet3d.units import GIB, MIB

GPU = [Path("/dev/nvidia0")]


def test_torch_2_9_is_excluded_and_blocks_half_precision_on_a_gpu():
    def check(version, **changes):
        defaults = {"cuda": "12.8", "gpu": True, "half": True, "devices": GPU}
        return preflight.check_torch_build(version, **(defaults | changes))

    assert check("2.9.1+cu128").is_fatal
    assert not check("2.9.1+cu128", half=False).is_fatal
    assert not check("2.9.0+cpu", gpu=False).is_fatal
    assert check("2.10.0+cu128") is None
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (torch,) = [r for r in project["project"]["dependencies"] if Requirement(r).name == "torch"]
    assert not {"2.9.0", "2.9.1"} & set(Requirement(torch).specifier.filter(["2.9.0", "2.9.1"]))
    assert "2.13.0" in Requirement(torch).specifier


def test_a_cudnn_that_torch_avoids_is_reported_for_plain_modules_in_half_precision():
    problem = preflight.check_cudnn(91_002, half=True, is_fused=False)
    assert problem.message.startswith("cuDNN 9.10: torch computes half-precision 3D convolutions")
    assert not problem.is_fatal
    for cudnn, half, is_fused in (
        (91_002, False, False),
        (91_002, True, True),
        (90_701, True, False),
        (91_501, True, False),
        (None, True, False),
    ):
        assert preflight.check_cudnn(cudnn, half=half, is_fused=is_fused) is None


def test_a_gpu_that_torch_does_not_find_is_reported(tmp_path):
    for name in ("nvidia0", "nvidia-uvm", "nvidiactl"):
        (tmp_path / name).touch()
    devices = preflight.list_nvidia_devices(tmp_path)
    assert [d.name for d in devices] == ["nvidia0"]

    def message(cuda, devices):
        problem = preflight.check_torch_build(
            "2.13", cuda=cuda, gpu=False, half=False, devices=devices
        )
        return problem and problem.message

    assert "finds no GPU" in message("12.8", devices)
    assert "built without CUDA" in message(None, devices)
    assert message("12.8", []) is None


def test_a_small_dev_shm_stops_a_run_with_workers_and_says_what_to_do():
    problem = preflight.check_shm(workers=8, processes=1, batch=100 * MIB, free=64 * MIB)
    assert problem.is_fatal
    assert "64 MiB left" in problem.message
    assert "batches of 8 workers need 1.6 GiB" in problem.message
    assert "--shm-size=2g" in problem.message
    assert "data.num_workers=0" in problem.message
    assert preflight.check_shm(workers=8, processes=1, batch=4 * MIB, free=64 * MIB) is None
    assert preflight.check_shm(workers=8, processes=1, batch=GIB, free=None) is None


def test_too_many_workers_for_the_ram_are_reported_with_a_number_that_fits():
    problem = preflight.check_worker_ram(workers=16, processes=1, batch=8 * MIB, free=GIB)
    assert not problem.is_fatal
    assert "16 workers need about 2.0 GiB of RAM, 1.0 GiB is free" in problem.message
    assert "data.num_workers=8" in problem.message
    assert preflight.check_worker_ram(workers=8, processes=1, batch=8 * MIB, free=GIB) is None


def test_the_workers_of_all_processes_on_a_machine_are_counted():
    problem = preflight.check_shm(workers=2, processes=4, batch=100 * MIB, free=GIB)
    assert "4 x 2 workers need 1.6 GiB" in problem.message
    assert preflight.check_shm(workers=2, processes=2, batch=100 * MIB, free=GIB) is None
    problem = preflight.check_worker_ram(workers=4, processes=4, batch=8 * MIB, free=GIB)
    assert "4 x 4 workers need about 2.0 GiB of RAM" in problem.message
    assert "data.num_workers=2" in problem.message


def test_linux_without_dev_shm_has_no_shared_memory_and_other_systems_need_no_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "SHM", tmp_path / "shm")
    free = preflight.get_free_shm(preflight.SHM)
    problem = preflight.check_shm(workers=2, processes=1, batch=MIB, free=free)
    assert problem.is_fatal
    assert problem.message.startswith(
        f"{tmp_path / 'shm'} is missing, but the batches of 2 workers"
    )
    monkeypatch.setattr(preflight.sys, "platform", "darwin")
    assert preflight.get_free_shm(preflight.SHM) is None


def test_workers_that_are_not_forked_need_the_ram_of_their_own_torch(monkeypatch):
    def needs(method):
        monkeypatch.setattr(preflight, "get_context", lambda: multiprocessing.get_context(method))
        problem = preflight.check_worker_ram(workers=4, processes=1, batch=MIB, free=512 * MIB)
        return problem and problem.message

    assert needs("fork") is None
    assert needs("spawn").startswith("4 workers need about 672 MiB of RAM")


def test_a_system_without_a_limit_of_open_files_has_no_problem_with_it(monkeypatch):
    monkeypatch.setattr(preflight, "resource", None)  # Windows
    assert preflight.get_file_limits() is None
    preflight.raise_open_file_limit(4)
    assert preflight.check_open_files(10_000, hard=None) is None


def test_the_limit_of_open_files_is_raised_or_reported():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
        preflight.raise_open_file_limit(4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (192, limits[1])
        preflight.raise_open_file_limit(1)  # never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 192
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert preflight.check_open_files(4, hard=192) is None
    assert "the limit is 160" in preflight.check_open_files(4, hard=160).message
    assert "data.num_workers=2" in preflight.check_open_files(4, hard=160).message


def test_a_disk_too_small_for_the_checkpoints_stops_the_run(tmp_path, monkeypatch):
    def set_free(nbytes):
        usage = type(preflight.shutil.disk_usage(tmp_path))(0, 0, nbytes)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)

    folder = tmp_path / "run" / "checkpoints"
    set_free(3 * MIB)
    problem = preflight.check_disk(folder, checkpoint=MIB)
    assert problem.is_fatal
    assert "3 MiB left, but checkpoints need 4 MiB" in problem.message
    folder.mkdir(parents=True)
    (folder / "last.ckpt").write_bytes(bytes(MIB))  # will be replaced
    assert preflight.check_disk(folder, checkpoint=MIB) is None


def test_a_folder_that_is_not_writable_is_reported_before_it_is_needed(tmp_path):
    assert preflight.check_writable(tmp_path / "not" / "there") is None
    problem = preflight.check_writable(Path("/proc/self/not/there"))
    assert problem.is_fatal
    assert "/proc/self is not writable" in problem.message


def test_tritons_cache_must_be_writable_and_allow_execution(tmp_path, monkeypatch):
    assert preflight.check_triton_cache(tmp_path / "triton") is None
    problem = preflight.check_triton_cache(Path("/proc/self/triton"))
    assert problem.is_fatal
    assert "is not writable" in problem.message
    monkeypatch.setattr(preflight, "allows_exec", lambda _: False)
    problem = preflight.check_triton_cache(tmp_path / "triton")
    assert problem.is_fatal
    assert f"{tmp_path} is mounted noexec, but Triton caches kernels there" in problem.message


def test_tritons_cache_is_ours_unless_variables_name_another():
    cache = get_triton_cache
    assert cache({"TRITON_CACHE_DIR": "/a", "TRITON_HOME": "/b"}) == Path("/a")
    assert cache({"TRITON_HOME": "/b"}) == Path("/b/.triton/cache")
    assert cache({}) == get_kernel_cache() / "triton"
