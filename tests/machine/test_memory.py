import torch

from unet3d.machine.memory import get_available_bytes, read_meminfo


def test_a_cpus_available_memory_is_plausible():
    available = get_available_bytes(torch.device("cpu"))
    assert available is None or 2**20 < available < 2**50


def test_without_proc_meminfo_nothing_is_known(tmp_path):
    assert read_meminfo(tmp_path / "none") == {}
