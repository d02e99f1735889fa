import pytest

from unet3d.machine.cgroups import get_available_memory, get_cpu_quota, get_memory_limit


@pytest.fixture
def group(tmp_path):
    """Return a function that writes the files of a control group below a mount."""
    mount = tmp_path / "cgroup"
    (mount / "memory").mkdir(parents=True)

    def write(path, **files):
        folder = mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")
        return mount

    return write


def write_own(tmp_path, text):
    file = tmp_path / "own"
    file.write_text(text)
    return file


def test_a_containers_limit_applies_and_cached_files_count_as_free(group, tmp_path):
    mount = group(".", memory__max="1000", memory__current="700")
    group(".", memory__stat="anon 500\ninactive_file 150")
    own = write_own(tmp_path, "0::/\n")
    assert (get_memory_limit(mount, own), get_available_memory(mount, own)) == (1000, 450)
    group(".", memory__max="max")
    assert (get_memory_limit(mount, own), get_available_memory(mount, own)) == (None, None)


def test_a_jobs_limit_is_the_lowest_of_its_nested_groups(group, tmp_path):
    mount = group("slurm/job_17", memory__max="1000", memory__current="10", cpu__max="max 100000")
    group("slurm/job_17/step_0", memory__max="max", memory__current="10")
    group("slurm", memory__max="3000", memory__current="2900", cpu__max="250000 100000")
    group("slurm/job_18", memory__max="1", memory__current="0")
    own = write_own(tmp_path, "0::/slurm/job_17/step_0\n")
    assert get_memory_limit(mount, own) == 1000
    assert get_available_memory(mount, own) == 100
    assert get_cpu_quota(mount, own) == 2.5


def test_version_1_has_a_mount_per_controller(group, tmp_path):
    mount = group("memory/docker/a", memory__usage_in_bytes="300")
    group("memory/docker/a", memory__limit_in_bytes="1000", memory__stat="total_inactive_file 50")
    group("memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="9")
    group("cpu/docker/a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    group("cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    own = write_own(tmp_path, "4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n0::/\n")
    assert (get_memory_limit(mount, own), get_available_memory(mount, own)) == (1000, 750)
    assert get_cpu_quota(mount, own) == 1.5


def test_a_container_whose_group_is_mounted_as_the_root_is_supported(group, tmp_path):
    mount = group("memory", memory__limit_in_bytes="1000", memory__usage_in_bytes="300")
    own = write_own(tmp_path, "4:memory:/docker/not/visible/here\n0::/../..\n")
    assert get_memory_limit(mount, own) == 1000


def test_without_control_groups_there_is_no_limit(tmp_path):
    nowhere = tmp_path / "none"
    for read in (get_memory_limit, get_available_memory, get_cpu_quota):
        assert read(nowhere, nowhere) is None
