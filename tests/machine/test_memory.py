import torch

from unet3d.machine.memory import available_bytes, container_left


def test_a_cpu_has_what_its_processes_may_still_take():
    found = available_bytes(torch.device("cpu"))
    assert found is None or 2**20 < found < 2**50


def test_a_containers_limit_counts_and_cached_files_do_not(tmp_path):
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_left(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert container_left(tmp_path) is None
    assert container_left(tmp_path / "none") is None
