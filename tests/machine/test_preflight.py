import resource
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from unet3d.machine import preflight
from unet3d.units import GIB, MIB

GPU = [Path("/dev/nvidia0")]


def test_torch_2_9_is_excluded_and_stops_half_precision_on_a_gpu():
    def lack(version, **facts):
        usual = {"cuda": "12.8", "gpu": True, "half": True, "devices": GPU}
        return preflight.check_torch_build(version, **(usual | facts))

    assert lack("2.9.1+cu128").stop
    assert not lack("2.9.1+cu128", half=False).stop
    assert not lack("2.9.0+cpu", gpu=False).stop
    assert lack("2.10.0+cu128") is None
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (torch,) = [r for r in project["project"]["dependencies"] if Requirement(r).name == "torch"]
    assert not {"2.9.0", "2.9.1"} & set(Requirement(torch).specifier.filter(["2.9.0", "2.9.1"]))
    assert "2.13.0" in Requirement(torch).specifier


def test_a_gpu_that_the_system_shows_and_torch_does_not_find_is_told(tmp_path):
    for name in ("nvidia0", "nvidia-uvm", "nvidiactl"):
        (tmp_path / name).touch()
    devices = preflight.nvidia_devices(tmp_path)
    assert [d.name for d in devices] == ["nvidia0"]

    def said(cuda, devices):
        lack = preflight.check_torch_build(
            "2.13", cuda=cuda, gpu=False, half=False, devices=devices
        )
        return lack and lack.what

    assert "finds no GPU" in said("12.8", devices)
    assert "built without CUDA" in said(None, devices)
    assert said("12.8", []) is None


def test_a_small_dev_shm_stops_a_run_with_workers_and_names_what_helps():
    lack = preflight.check_shm(workers=8, processes=1, batch=100 * MIB, free=64 * MIB)
    assert lack.stop
    assert "64 MiB left" in lack.what
    assert "8 workers put 1.6 GiB" in lack.what
    assert "--shm-size=2g" in lack.what
    assert "data.num_workers=0" in lack.what
    assert preflight.check_shm(workers=8, processes=1, batch=4 * MIB, free=64 * MIB) is None
    assert preflight.check_shm(workers=8, processes=1, batch=GIB, free=None) is None


def test_workers_that_do_not_fit_ram_are_warned_of_with_a_number_that_does():
    lack = preflight.check_worker_ram(workers=16, processes=1, batch=8 * MIB, free=GIB)
    assert not lack.stop
    assert "16 workers take about 2.0 GiB of RAM, 1.0 GiB are free" in lack.what
    assert "data.num_workers=8" in lack.what
    assert preflight.check_worker_ram(workers=8, processes=1, batch=8 * MIB, free=GIB) is None


def test_the_workers_of_all_processes_of_a_machine_are_counted():
    lack = preflight.check_shm(workers=2, processes=4, batch=100 * MIB, free=GIB)
    assert "4 x 2 workers put 1.6 GiB" in lack.what
    assert preflight.check_shm(workers=2, processes=2, batch=100 * MIB, free=GIB) is None
    lack = preflight.check_worker_ram(workers=4, processes=4, batch=8 * MIB, free=GIB)
    assert "4 x 4 workers take about 2.0 GiB of RAM" in lack.what
    assert "data.num_workers=2" in lack.what


def test_the_limit_of_open_files_is_raised_or_what_is_missing_told():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        preflight.allow_open_files(4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (192, before[1])
        preflight.allow_open_files(1)  # never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 192
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert preflight.check_open_files(4, hard=192) is None
    assert "no more than 160 are allowed" in preflight.check_open_files(4, hard=160).what
    assert "data.num_workers=2" in preflight.check_open_files(4, hard=160).what


def test_a_disk_without_room_for_the_checkpoints_stops_the_run(tmp_path, monkeypatch):
    def free(nbytes):
        usage = type(preflight.shutil.disk_usage(tmp_path))(0, 0, nbytes)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)

    folder = tmp_path / "run" / "checkpoints"
    free(3 * MIB)
    lack = preflight.check_disk(folder, checkpoint=MIB)
    assert lack.stop
    assert "3 MiB left, and checkpoints take 4 MiB" in lack.what
    folder.mkdir(parents=True)
    (folder / "last.ckpt").write_bytes(bytes(MIB))  # makes way for the next one
    assert preflight.check_disk(folder, checkpoint=MIB) is None


def test_a_folder_that_cannot_be_written_is_told_before_it_is_needed(tmp_path):
    assert preflight.check_writable(tmp_path / "not" / "there") is None
    lack = preflight.check_writable(Path("/proc/self/not/there"))
    assert lack.stop
    assert "/proc/self cannot be written to" in lack.what


def test_triton_needs_a_cache_that_can_be_written_and_loaded_from(tmp_path, monkeypatch):
    assert preflight.check_triton_cache(tmp_path / "triton") is None
    lack = preflight.check_triton_cache(Path("/proc/self/triton"))
    assert lack.stop
    assert "cannot be written to" in lack.what
    monkeypatch.setattr(preflight, "allows_exec", lambda _: False)
    lack = preflight.check_triton_cache(tmp_path / "triton")
    assert lack.stop
    assert f"{tmp_path} is mounted noexec, and Triton compiles into it" in lack.what


def test_triton_s_cache_is_where_triton_looks_for_it():
    where = preflight.triton_cache
    assert where({"TRITON_CACHE_DIR": "/a", "TRITON_HOME": "/b"}) == Path("/a")
    assert where({"TRITON_HOME": "/b"}) == Path("/b/.triton/cache")
    assert where({}) == Path.home() / ".triton" / "cache"
