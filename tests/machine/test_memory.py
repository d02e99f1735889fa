import torch

from unet3d.machine.memory import get_available_bytes, meminfo


def test_a_cpu_has_what_its_processes_may_still_take():
    found = get_available_bytes(torch.device("cpu"))
    assert found is None or 2**20 < found < 2**50


def test_where_linux_gives_no_account_of_memory_nothing_is_known(tmp_path):
    assert meminfo(tmp_path / "none") == {}
