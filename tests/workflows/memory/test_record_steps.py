"""Recordings of GPUs, rehearsed on a GPU whose allocator is the model."""

import gzip
import json
from dataclasses import replace

import pytest
import torch

from scripts.docs.update_tables import recordings
from tests.memory.helpers.simulated_gpu import SimulatedGpu
from unet3d.cli.main import main
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training
from unet3d.errors import UsageError
from unet3d.memory.allocator import round_block_size
from unet3d.memory.library_workspaces import get_cublas_bytes
from unet3d.memory.recording import Recording, read_recording, record_allocations, write_recording
from unet3d.units import MIB
from unet3d.workflows.memory.estimate import estimate_memory
from unet3d.workflows.memory.record_steps import (
    compare_with_estimate,
    describe_job,
    record_steps,
    restore_job,
)

MACHINE = {"gpu": "Simulated", "torch": "2.11.0", "cudnn": "9.19.0"}
WORDS = ("data.patch_size=[48,48,48]", "precision=16", "trainer.accelerator=gpu")


def compose(*words):
    return parse_training(compose_config(words, "train"))


def iter_strings(content):
    """Yield all strings in nested mappings and lists, without the keys."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from iter_strings(value)


def make_recording(settings, sizes=None):
    gpu = SimulatedGpu(estimate_memory(settings), sizes)
    before, events, starts = record_allocations(gpu.run_step, gpu.take_snapshot, gpu.reset_peak)
    return Recording(
        machine=MACHINE,
        job=describe_job(settings),
        cublas_bytes=get_cublas_bytes(),
        before=before,
        events=events,
        step_starts=starts,
        peak_allocated=gpu.allocator.peak_allocated,
        peak_reserved=gpu.allocator.reserved,
        reserved_after=gpu.allocator.reserved,
        unet3d="0",
    )


@pytest.fixture(scope="module")
def settings():
    return compose(*WORDS, "checkpointing=none")


@pytest.fixture(scope="module")
def recording(settings):
    return make_recording(settings)


def test_a_gpu_that_does_as_estimated_shows_no_difference(recording, tmp_path):
    write_recording(recording, tmp_path / "step.json.gz")
    comparison = compare_with_estimate(read_recording(tmp_path / "step.json.gz"))
    assert comparison.num_equal == comparison.num_recorded > 50
    assert not comparison.differences
    assert comparison.errors == {"allocated": 0, "reserved": 0}
    assert comparison.replay.blocks > 500
    assert not comparison.replay.misplaced


def test_a_larger_block_is_a_difference_with_the_module_that_allocates_it(settings):
    estimate = estimate_memory(settings)
    start, stop = estimate.steady_step
    largest = max(
        (estimate.trace.blocks[e - 1] for e in estimate.trace.events[start:stop] if e > 0),
        key=lambda block: block.nbytes,
    )
    comparison = compare_with_estimate(
        make_recording(settings, {largest.id: largest.nbytes + 3 * MIB})
    )
    recorded = {abs(d.recorded) for d in comparison.differences if d.recorded is not None}
    origins = {d.origin for d in comparison.differences if d.estimated is not None}
    assert recorded == {round_block_size(largest.nbytes) + 3 * MIB}
    assert origins == {f"{largest.op} {largest.path}".strip()}
    assert comparison.errors["reserved"] < 0


def test_blocks_at_other_addresses_are_counted(recording):
    events = [list(event) for event in recording.events]
    number = next(n for n, (what, _, size) in enumerate(events) if what == "a" and size > MIB)
    events[number][1] += 512
    comparison = compare_with_estimate(replace(recording, events=events))
    assert comparison.replay.misplaced


def test_a_file_has_neither_paths_nor_names_of_the_user(recording, tmp_path):
    write_recording(recording, tmp_path / "step.json.gz")
    content = json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))
    strings = list(iter_strings(content["job"]))
    assert strings
    assert not [text for text in strings if "/" in text or "data" in text]
    named = compose(*WORDS, "data.regions={secret: [1, 2], hidden: [2]}")
    assert "secret" not in json.dumps(describe_job(named))
    assert restore_job(describe_job(named)).data.regions == {"region_1": (1, 2), "region_2": (2,)}


def test_a_network_of_the_users_own_is_not_recorded():
    own = compose("model._target_=my_lab.Net")
    with pytest.raises(UsageError, match=r"and not my_lab\.Net"):
        describe_job(own)


@pytest.mark.parametrize(
    "words",
    [
        (
            "model=dynunet",
            "model.filters=[4,8,8]",
            "model.strides=[1,2,2]",
            "model.kernel_size=[3,3,3]",
        ),
        ("checkpointing=lean", "optimizer=sgd", "pool=median", "trainer.devices=2"),
    ],
)
def test_a_restored_job_has_the_same_estimate(words):
    small = ("data.patch_size=[16,16,16]", "trainer.accelerator=gpu")
    settings = compose(*words, *small)
    restored = restore_job(json.loads(json.dumps(describe_job(settings))))
    assert estimate_memory(restored).peak == estimate_memory(settings).peak


def test_the_command_compares_a_recording(recording, tmp_path, capsys):
    path = tmp_path / "step.json.gz"
    write_recording(recording, path)
    assert main(["memory", f"recording={path}"]) == 0
    out = capsys.readouterr().out
    assert "Simulated, torch 2.11.0, cuDNN 9.19.0" in out
    assert "(+0.00%)" in out
    assert main(["memory", f"recording={path}", "format=json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["misplaced_blocks"] == 0
    assert content["equal_events"] == content["events"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; measure=true writes it"),
        (b"text", "is not a recording"),
        ("[1]", "has the format None, expected 'unet3d-recording-1'"),
        ('{"schema": "x"}', "has the format 'x'"),
        ('{"schema": "unet3d-recording-1"}', "is not a recording"),
    ],
)
def test_another_file_is_refused_in_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "step.json.gz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_bytes(gzip.compress(content.encode()))
    assert main(["memory", f"recording={path}"]) == 2
    assert message in capsys.readouterr().err


def test_recording_needs_a_gpu_and_a_table(tmp_path, capsys):
    path = tmp_path / "step.json.gz"
    if not torch.cuda.is_available():
        assert main(["memory", "measure=true", f"recording={path}"]) == 2
        assert "measure=true needs a GPU" in capsys.readouterr().err
    assert main(["memory", f"recording={path}", "view=layers"]) == 2
    assert "recording= is compared in a table or JSON" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_is_recorded_and_its_blocks_are_at_the_modeled_addresses():
    comparison = compare_with_estimate(record_steps(compose(*WORDS)))
    assert not comparison.replay.misplaced
    assert comparison.errors["allocated"] == pytest.approx(0, abs=1)


def test_recordings_in_the_repository_are_rows_of_a_table(recording, tmp_path):
    assert recordings(tmp_path) == ""
    (tmp_path / "recordings").mkdir()
    write_recording(recording, tmp_path / "recordings" / "gpu.json.gz")
    *_, row = recordings(tmp_path).splitlines()
    assert row.startswith("| Simulated, torch 2.11.0 | UNet3D, 48x48x48, `precision=16` |")
    assert row.endswith("| +0.0% | +0.0% |")
