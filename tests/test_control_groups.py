"""The limits of control groups."""

import os

import pytest

from unet3d.control_groups import count_usable_cores, read_cgroups


@pytest.fixture
def limits(tmp_path):
    """Return what is read of control groups, whose files are given by folder, for a process."""

    def read(own, groups, read_limits=read_cgroups):
        for folder, files in groups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (tmp_path / folder / name).write_text(f"{content}\n")
        (tmp_path / "own").write_text(own)
        return read_limits(tmp_path, tmp_path / "own")

    return read


def describe_group(limit, used, cached=0):
    stat = f"anon 500\ninactive_file {cached}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def test_the_limits_of_all_groups_around_a_job_apply_and_cached_files_count_as_free(limits):
    groups = {
        "slurm/job_17/step_0": describe_group("max", 10),
        "slurm/job_17": describe_group(1000, 700, cached=150),
        "slurm": describe_group(3000, 2900),
        "slurm/job_18": describe_group(1, 0),
    }
    assert limits("0::/slurm/job_17/step_0\n", groups) == [(1000, 550), (3000, 2900)]


def test_version_1_has_a_mount_per_controller(limits):
    stat = "total_inactive_file 50"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    groups = {
        "memory/docker/a": dict(zip(names, (1000, 300, stat), strict=True)),
        "memory": dict(zip(names, (2**63 - 4096, 9, stat), strict=True)),
    }
    own = "4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n0::/\n"
    assert limits(own, groups) == [(1000, 250)]


@pytest.mark.parametrize(
    ("own", "groups", "cores"),
    [
        (
            "0::/pod/a\n",
            {"pod/a": {"cpu.max": "max 100000"}, "pod": {"cpu.max": "150000 100000"}},
            2,
        ),
        (
            "4:cpu,cpuacct:/a\n",
            {"cpu/a": {"cpu.cfs_quota_us": 300_000, "cpu.cfs_period_us": 100_000}},
            3,
        ),
        ("4:cpu:/a\n", {"cpu/a": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100_000}}, 8),
    ],
)
def test_a_job_has_the_cores_whose_time_its_groups_may_use(monkeypatch, limits, own, groups, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert limits(own, groups, count_usable_cores) == cores


def test_other_systems_have_no_groups(tmp_path):
    assert read_cgroups(tmp_path, tmp_path / "none") == []
