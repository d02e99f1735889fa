"""A scan that is larger than memory gets the labels that it has in memory."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import partial

import nibabel as nib
import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.helpers.datasets import save
from tests.inference.conftest import build_predictor, make_ensemble
from unet3d.data.formats.volumes import read_labels, write_labels
from unet3d.data.preprocessing import regions
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.inference import memory_plan, stored_scans
from unet3d.inference.predictor import Predictor
from unet3d.inference.scans import find_pending, find_reason_to_segment, segment_scans

PERMUTED = np.array([[0, -1.0, 0, 3], [0, 0, 2.0, 0], [1.5, 0, 0, 0], [0, 0, 0, 1]])
AFFINES = {"axes as they are": np.eye(4), "axes permuted and flipped": PERMUTED}


@pytest.fixture
def tasks(write_scans, tmp_path):
    """Return a function that writes a scan and names its labels, as they are read and stored."""

    def make(affine=AFFINES["axes as they are"], suffix=".npy", shape=(30, 22, 26)):
        voxels = np.random.default_rng(0).normal(100, 20, shape).astype(np.float32)
        voxels[:3] = 0
        voxels[:, -4:] = 0
        [task] = write_scans()
        save(task.scan.files[0], voxels, affine)
        return [replace(task, labels=tmp_path / f"{name}{suffix}") for name in ("whole", "stored")]

    return make


def store(predictor, monkeypatch, *, slabs=3):
    """Let the predictor read scans by parts, in a number of slabs, of blocks of 500 voxels."""
    monkeypatch.setattr(Predictor, "estimate_reading", lambda self, task: 2**40)
    monkeypatch.setattr(regions, "BLOCK", 500)

    def choose_slabs(volume, budget, processes=1):
        plans = memory_plan.list_plans(volume, budget, split=slabs > 1)
        return next(plan for plan in plans if len(plan.slabs) == slabs)

    monkeypatch.setattr("unet3d.inference.predictor.choose_plan", choose_slabs)
    return predictor


def predict(predictor, task):
    """Segment a scan; raise what it failed with."""
    for _, error in segment_scans(predictor, [task], prefetch=False):
        raise error
    return task.labels


@pytest.mark.parametrize("affine", AFFINES.values(), ids=AFFINES)
@pytest.mark.parametrize("spacing", [None, (1.3, 0.8, 1.9)], ids=["spacing kept", "resampled"])
@pytest.mark.parametrize("method", ["zscore_nonzero", "rescale_to_0_1"])
def test_labels_are_those_of_the_scan_in_memory(
    ensemble, tasks, monkeypatch, affine, spacing, method
):
    preprocessing = Preprocessing(num_classes=3, spacing_mm=spacing, normalize=(method,))
    predictor = build_predictor(replace(ensemble, preprocessing=preprocessing), flip_axes=(0,))
    whole, stored = tasks(affine)
    expected = np.load(predict(predictor, whole))
    store(predictor, monkeypatch)
    prepared = predictor.prepare(stored)
    assert prepared.is_stored
    assert len(prepared.plan.slabs) == 3
    assert len(np.unique(expected)) == 3
    np.testing.assert_array_equal(np.load(predict(predictor, stored)), expected)


def test_labels_are_written_in_the_values_and_the_format_of_the_output(
    ensemble, tasks, monkeypatch
):
    pytest.importorskip("zarr")
    values = Preprocessing(num_classes=3, label_values=(0, 17, 1035))
    predictor = build_predictor(replace(ensemble, preprocessing=values))
    whole, stored = tasks(suffix=".ome.zarr")
    predict(predictor, whole)
    predict(store(predictor, monkeypatch), stored)
    (expected, affine), (labels, own) = map(read_labels, (whole.labels, stored.labels))
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_array_equal(own, affine)
    assert set(np.unique(labels)) == {0, 17, 1035}


def test_a_prediction_that_was_ended_goes_on_after_the_last_slab(predictor, tasks, monkeypatch):
    pytest.importorskip("zarr")
    whole, stored = tasks(suffix=".ome.zarr")
    predict(predictor, whole)
    store(predictor, monkeypatch, slabs=4)
    write, written = stored_scans.LabelStore.write, []

    def end_after_two(self, order, columns, box, labels):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(columns)
        write(self, order, columns, box, labels)

    monkeypatch.setattr(stored_scans.LabelStore, "write", end_after_two)
    with pytest.raises(KeyboardInterrupt):
        predict(predictor, stored)
    assert not stored.labels.exists()

    def keep(self, order, columns, box, labels):
        written.append(columns)
        write(self, order, columns, box, labels)

    monkeypatch.setattr(stored_scans.LabelStore, "write", keep)
    messages: list[str] = []
    segmenting = partial(predictor.compute, log=messages.append)
    assert not list(segment_scans(predictor, [stored], prefetch=False, compute=segmenting))
    assert messages == ["0: goes on after 2 slabs of an earlier command"]
    assert len(written) == len(set(written)) == 4
    np.testing.assert_array_equal(read_labels(stored.labels)[0], read_labels(whole.labels)[0])
    assert {path.name for path in stored.labels.parent.glob(".part*")} == set()


def test_what_was_written_with_other_options_is_not_kept(ensemble, tasks, monkeypatch):
    _, stored = tasks()
    predictor = store(build_predictor(ensemble), monkeypatch)
    finish = stored_scans.LabelStore.finish
    monkeypatch.setattr(stored_scans.LabelStore, "finish", fail)
    with pytest.raises(RuntimeError, match="ended"):
        predict(predictor, stored)
    monkeypatch.setattr(stored_scans.LabelStore, "finish", finish)
    other = store(build_predictor(ensemble, overlap=0.25), monkeypatch)
    batches = []
    prepared = replace(other.prepare(stored), origin=other.describe_settings())
    other.compute(prepared, on_windows=batches.append)()
    assert set(batches) == {1}  # no slab was skipped


def test_what_a_kill_left_of_removing_a_draft_is_not_continued(ensemble, tasks, monkeypatch):
    _, stored = tasks()
    predictor = store(build_predictor(ensemble), monkeypatch)
    finish, remove = stored_scans.LabelStore.finish, stored_scans.remove
    write, written = stored_scans.LabelStore.write, []
    monkeypatch.setattr(stored_scans.LabelStore, "finish", fail)
    with pytest.raises(RuntimeError, match="ended"):
        predict(predictor, stored)
    monkeypatch.setattr(stored_scans, "remove", fail)
    with pytest.raises(RuntimeError, match="ended"):
        predict(store(build_predictor(ensemble, overlap=0.25), monkeypatch), stored)
    monkeypatch.setattr(stored_scans, "remove", remove)
    monkeypatch.setattr(stored_scans.LabelStore, "finish", finish)

    def keep(self, order, columns, box, labels):
        written.append(columns)
        write(self, order, columns, box, labels)

    monkeypatch.setattr(stored_scans.LabelStore, "write", keep)
    predict(predictor, stored)
    assert len(written) == 3  # no slab was skipped


def test_what_a_kill_left_of_labels_goes_where_the_scan_fits_into_memory(ensemble, tasks):
    whole, _ = tasks()
    draft, record = stored_scans.get_draft_paths(whole.labels)
    record.parent.mkdir()
    for path in (draft, record):
        path.touch()
    predict(build_predictor(ensemble), whole)
    assert whole.labels.exists()
    assert not draft.exists()
    assert not record.exists()


def test_labels_whose_probabilities_are_being_removed_are_made_again(
    ensemble, tasks, monkeypatch, tmp_path
):
    stored = replace(tasks()[1], probabilities=tmp_path / "scan.nii")
    predictor = store(build_predictor(ensemble), monkeypatch)
    predict(predictor, stored)
    settings = predictor.describe_settings()
    assert find_reason_to_segment(stored, settings) is None
    monkeypatch.setattr("unet3d.inference.scans.remove", fail)
    with pytest.raises(RuntimeError, match="ended"):
        predict(store(build_predictor(ensemble, overlap=0.25), monkeypatch), stored)
    assert find_reason_to_segment(stored, settings) == "missing"


@pytest.mark.parametrize("regions", [None, {"x": [1, 2, 3], "y": [2, 3], "z": [3]}], ids=str)
@pytest.mark.parametrize(
    ("suffix", "affine"), [(".ome.zarr", np.diag([1.5, 2, 1, 1])), (".npy", PERMUTED)]
)
def test_probabilities_are_those_of_the_scan_in_memory_as_bytes(
    ensemble, tasks, monkeypatch, tmp_path, suffix, affine, regions
):
    if suffix == ".ome.zarr":
        zarr = pytest.importorskip("zarr")
        monkeypatch.setattr("unet3d.data.formats.ome_zarr.LOWEST", 22)
    preprocessing = Preprocessing(num_classes=3, spacing_mm=(1.3, 0.8, 1.9))
    ensemble = replace(ensemble, classes=("background", "a", "b", "c")[: 4 if regions else 3])
    predictor = build_predictor(replace(ensemble, preprocessing=preprocessing, regions=regions))
    whole, stored = (
        replace(task, probabilities=tmp_path / f"{task.labels.name}-probabilities.nii")
        for task in tasks(affine, suffix)
    )
    predict(predictor, whole)
    expected = np.moveaxis(np.asarray(nib.load(whole.probabilities).dataobj), -1, 0)
    store(predictor, monkeypatch)
    assert "probabilities: up to " in predictor.prepare(stored).memory_summary
    predict(predictor, stored)
    path = tmp_path / f"{stored.labels.name}-probabilities{suffix}"
    if suffix == ".ome.zarr":
        group = zarr.open_group(path)
        image = group.attrs["ome"]["multiscales"][0]
        assert [axis["name"] for axis in image["axes"]] == ["c", "z", "y", "x"]
        shapes = [group[level["path"]].shape for level in image["datasets"]]
        assert shapes == [(3, 26, 22, 30), (3, 13, 22, 15)]
        scales = [level["coordinateTransformations"][0]["scale"] for level in image["datasets"]]
        assert scales == [[1, 1, 2, 1.5], [1, 2, 2, 3]]
        assert group["0"].chunks[0] == group["1"].chunks[0] == 1
        found = np.transpose(group["0"][:], (0, 3, 2, 1))
    else:
        found = np.load(path)
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found / 255, expected, atol=0.5 / 255 + 1e-6)
    is_background = np.asarray(read_labels(stored.labels)[0]) == 0
    np.testing.assert_array_equal(is_background, np.asarray(read_labels(whole.labels)[0]) == 0)


def test_a_prediction_with_probabilities_goes_on_after_the_last_slab(
    predictor, tasks, monkeypatch, tmp_path
):
    stored = replace(tasks()[1], probabilities=tmp_path / "probabilities" / "scan.nii")
    store(predictor, monkeypatch, slabs=4)
    finish, write = stored_scans.LabelStore.finish, stored_scans.LabelStore.write
    monkeypatch.setattr(stored_scans.LabelStore, "finish", fail)
    with pytest.raises(RuntimeError, match="ended"):
        predict(predictor, stored)
    monkeypatch.setattr(stored_scans.LabelStore, "finish", finish)
    monkeypatch.setattr(stored_scans.LabelStore, "write", fail)
    predict(predictor, stored)
    found = np.load(tmp_path / "probabilities" / "scan.npy")
    assert found.shape == (3, 30, 22, 26)
    chosen = np.take_along_axis(found, np.load(stored.labels)[None], 0)
    np.testing.assert_array_equal(chosen, found.max(0, keepdims=True))
    settings = predictor.describe_settings()
    assert find_reason_to_segment(stored, settings) is None
    (tmp_path / "probabilities" / "scan.npy").unlink()
    assert find_reason_to_segment(stored, settings) == "outdated"
    monkeypatch.setattr(stored_scans.LabelStore, "write", write)
    predict(predictor, stored)
    assert find_reason_to_segment(stored, settings) is None
    (tmp_path / "probabilities" / ".part-scan.npy").touch()
    predict(predictor, replace(stored, probabilities=None))
    names = {path.name for path in (tmp_path / "probabilities").iterdir()}
    assert names == {".unet3d"}
    (tmp_path / "probabilities" / "scan.nii").touch()
    assert find_reason_to_segment(stored, settings) == "taken"


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_processes_share_the_slabs_of_a_scan(ensemble, tasks, monkeypatch, tmp_path, suffix):
    if suffix == ".zarr":
        pytest.importorskip("zarr")
    whole, stored = (
        replace(task, probabilities=tmp_path / f"{task.labels.name}-probabilities.nii")
        for task in tasks(suffix=suffix)
    )
    predict(build_predictor(ensemble), whole)
    shares = [(2, 3), (0, 3), (3, 4), (1, 3)]
    written, write = [], stored_scans.LabelStore.write

    def keep(self, order, columns, box, labels):
        written.append((self.path.name, columns))
        write(self, order, columns, box, labels)

    monkeypatch.setattr(stored_scans.LabelStore, "write", keep)
    for share in shares:
        assert not stored.labels.exists()
        predict(store(build_predictor(ensemble, share=share), monkeypatch), stored)
    assert len(written) == len(set(written)) == 6
    np.testing.assert_array_equal(read_labels(stored.labels)[0], read_labels(whole.labels)[0])
    assert find_reason_to_segment(stored, build_predictor(ensemble).describe_settings()) is None
    names = {path.name for folder in (tmp_path, tmp_path / ".unet3d") for path in folder.iterdir()}
    assert names == {
        *(".unet3d", "0.nii", f"whole{suffix}", f"whole{suffix}-probabilities.nii"),
        *(f"stored{suffix}", f"stored{suffix}-probabilities{suffix}"),
        *(f"whole{suffix}.json", f"stored{suffix}.json"),
    }


def test_processes_that_measure_other_memory_share_the_slabs_of_the_first(
    ensemble, tasks, monkeypatch
):
    whole, stored = tasks()
    predict(build_predictor(ensemble), whole)
    for n, slabs in ((1, 3), (0, 5), (2, 4)):
        assert not stored.labels.exists()
        predictor = build_predictor(ensemble, share=(n, 3))
        predict(store(predictor, monkeypatch, slabs=slabs), stored)
    np.testing.assert_array_equal(read_labels(stored.labels)[0], read_labels(whole.labels)[0])


@pytest.mark.parametrize("suffix", [".npy", ".nii"])
def test_a_scan_that_can_be_read_but_not_segmented_in_memory_is_segmented_by_parts(
    ensemble, tasks, monkeypatch, suffix
):
    whole, other = tasks(suffix=suffix)
    predict(build_predictor(ensemble), whole)
    plan = Predictor.plan

    def refuse(self, task, scan):
        if not isinstance(scan.image, regions.RegionImage):
            raise DoesNotFitError("segmenting needs more")
        return plan(self, task, scan)

    monkeypatch.setattr(Predictor, "plan", refuse)
    if suffix == ".nii":  # labels that are not written by parts
        with pytest.raises(DoesNotFitError, match="segmenting needs more"):
            predict(build_predictor(ensemble), other)
    else:
        predict(build_predictor(ensemble), other)
        np.testing.assert_array_equal(read_labels(other.labels)[0], read_labels(whole.labels)[0])


def test_an_hdf5_file_without_chunks_is_read_by_parts(ensemble, tasks, monkeypatch, tmp_path):
    h5py = pytest.importorskip("h5py")
    whole, stored = tasks()
    voxels = np.asarray(nib.load(whole.scan.files[0]).dataobj)
    with h5py.File(tmp_path / "scan.h5", "w") as file:
        file["raw"] = voxels.T
        assert file["raw"].chunks is None
    scan = replace(stored.scan, files=(tmp_path / "scan.h5",))
    expected = np.load(predict(build_predictor(ensemble), replace(whole, scan=scan)))
    predictor = store(build_predictor(ensemble), monkeypatch)
    found = np.load(predict(predictor, replace(stored, scan=scan)))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("axis", range(3))
def test_chunks_that_are_read_often_are_named(ensemble, write_scans, monkeypatch, caplog, axis):
    zarr, reads = pytest.importorskip("zarr"), list[str]()
    [task] = write_scans()
    shape, layouts = (40, 48, 56), {"planes": [40, 48, 56], "cubes": [8, 8, 8]}
    layouts["planes"][axis] = 1
    get, segment = zarr.storage.LocalStore.get, stored_scans.segment_stored

    async def count(self, key, *args, **options):
        reads.append(f"{self.root.name}/{key}")
        return await get(self, key, *args, **options)

    def count_reads(*args):
        reads.clear()
        segment(*args)

    monkeypatch.setattr(stored_scans, "CHUNK", 8)
    monkeypatch.setattr(zarr.storage.LocalStore, "get", count)
    monkeypatch.setattr("unet3d.inference.predictor.segment_stored", count_reads)
    predictor = store(build_predictor(ensemble), monkeypatch)
    for name, chunks in layouts.items():
        path = task.labels.with_name(f"{name}.zarr")
        write_labels(path, np.zeros(shape, np.float32), task.scan.files[0])
        options = {"chunks": chunks[::-1], "dtype": "float32", "overwrite": True}
        array = zarr.open_group(path).create_array("0", shape=shape[::-1], **options)
        array[:] = np.random.default_rng(0).normal(size=array.shape)
        scan = replace(task.scan, files=(path,))
        predict(predictor, replace(task, scan=scan, labels=task.labels.with_name(f"{name}.npy")))
        counts = Counter(read for read in reads if f"{name}.zarr/0/c" in read)
        often = sum(counts.values()) / len(counts)
        layout = "x".join(map(str, chunks))
        expected = (
            f"{name}.zarr has chunks of {layout} voxels, each of which is read about {often:.0f} "
            "times: a copy with chunks of 8x8x8 is read faster"
        )
        messages = [record.getMessage() for record in caplog.records]
        assert messages == ([expected] if name == "planes" and axis > 0 else [])
        caplog.clear()


def fail(self, *_):
    raise RuntimeError("ended")


@pytest.mark.parametrize(
    ("suffix", "options", "message"),
    [
        (".nii", {}, "or set output_format=zarr or npy, which are written by parts"),
        (".npy", {"skip_background": 0.1}, "skip_background needs the whole scan in memory"),
    ],
)
def test_what_needs_the_whole_scan_is_refused(
    ensemble, tasks, monkeypatch, suffix, options, message
):
    _, stored = tasks(suffix=suffix)
    predictor = store(build_predictor(ensemble, **options), monkeypatch)
    with pytest.raises((UsageError, DoesNotFitError), match=message):
        predictor.prepare(stored)


def test_a_file_that_is_compressed_as_a_whole_is_named(predictor, tasks, monkeypatch, tmp_path):
    _, stored = tasks()
    labels = np.zeros((30, 22, 26), np.uint8)
    compressed = tmp_path / "scan.nii.gz"
    write_labels(compressed, labels, stored.scan.files[0])
    scan = replace(stored.scan, files=(compressed,))
    store(predictor, monkeypatch)
    with pytest.raises(DoesNotFitError, match="convert it to OME-Zarr"):
        predictor.prepare(replace(stored, scan=scan))


def test_components_are_said_to_be_kept(ensemble, tasks, monkeypatch, caplog):
    _, stored = tasks()
    predictor = build_predictor(ensemble, keep_largest_component=["a"])
    predict(store(predictor, monkeypatch), stored)
    assert "all components of a are kept, since the scan is segmented by parts" in caplog.text
    pending, notice = find_pending([stored], predictor.describe_settings(), overwrite=False)
    assert pending == []
    assert notice == (
        "stored.npy was segmented by parts, which keeps all components: overwrite=true segments it "
        "again"
    )
    others = build_predictor(ensemble).describe_settings()
    assert find_pending([stored], others, overwrite=False)[0] == [stored]


REGION = ((5, 24), (2, 15), (9, 26))


@pytest.mark.parametrize("affine", AFFINES.values(), ids=AFFINES)
@pytest.mark.parametrize("kernel_size", [1, 3])
def test_a_region_has_the_labels_of_the_whole_scan_and_the_rest_none(
    tasks, monkeypatch, affine, kernel_size
):
    torch.manual_seed(0)
    network = nn.Conv3d(1, 3, kernel_size, padding="same")
    whole, stored = tasks(affine)
    labels = np.load(predict(build_predictor(make_ensemble(network)), whole))
    predictor = build_predictor(make_ensemble(network), region=REGION)
    monkeypatch.setattr(regions, "BLOCK", 500)
    in_memory = build_predictor(make_ensemble(network)).prepare(whole).scan.statistics
    assert predictor.prepare(stored).scan.statistics.extent_mm == in_memory.extent_mm
    found, inside = np.load(predict(predictor, stored)), tuple(slice(*span) for span in REGION)
    expected = np.zeros_like(labels)
    expected[inside] = labels[inside]
    if kernel_size == 1:
        np.testing.assert_array_equal(found, expected)
    else:  # windows, whose borders are padded, lie elsewhere
        assert (found != expected).mean() < 0.02
    assert len(np.unique(found[inside])) > 1


def test_a_region_of_several_slabs_is_that_of_one(ensemble, tasks, monkeypatch):
    predictor = build_predictor(ensemble, region=REGION)
    whole, stored = tasks()
    expected = np.load(predict(store(predictor, monkeypatch, slabs=1), whole))
    found = np.load(predict(store(predictor, monkeypatch, slabs=3), stored))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("region", "suffix", "message"),
    [
        (
            ((0, 31), (0, 22), (0, 26)),
            ".npy",
            r"region=\[0, 31, .* within a scan of 30x22x26 voxels",
        ),
        (((0, 2), (0, 22), (0, 26)), ".npy", "holds background only"),
        (REGION, ".nii.gz", "region is read from 0.nii by parts: set output_format=zarr or npy"),
    ],
)
def test_a_region_that_cannot_be_segmented_is_refused(ensemble, tasks, region, suffix, message):
    task, _ = tasks(suffix=suffix)
    with pytest.raises(UsageError, match=message):
        build_predictor(ensemble, region=region).prepare(task)


@pytest.mark.slow
@pytest.mark.parametrize("spacing", [None, (0.8, 1.3, 1.1)], ids=["spacing kept", "resampled"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["labels", "probabilities"])
def test_the_memory_of_a_slab_is_estimated(
    ensemble, tasks, monkeypatch, tmp_path, spacing, probabilities
):
    preprocessing = Preprocessing(num_classes=3, spacing_mm=spacing)
    ensemble = replace(ensemble, preprocessing=preprocessing, patch_size=(32, 32, 32))
    predictor = store(build_predictor(ensemble), monkeypatch, slabs=2)
    _, stored = tasks(shape=(120, 130, 140))
    if probabilities:
        stored = replace(stored, probabilities=tmp_path / "probabilities" / "scan.nii")
    estimates = []
    estimate = memory_plan._estimate_stored

    def keep(volume, window_grid):
        estimates.append(estimate(volume, window_grid))
        return estimates[-1]

    monkeypatch.setattr(memory_plan, "_estimate_stored", keep)
    prepared = predictor.prepare(stored)
    assert set(prepared.scan.image.matrices) == (
        {0, 1, 2} if spacing else set()
    )  # and imports scipy
    tracemalloc.start()  # of numpy: what torch allocates is estimated as in memory
    try:
        predictor.compute(prepared)()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.4 * max(estimates[:2]) < peak <= max(estimates[:2])
