import threading
import tracemalloc

import nibabel
import numpy as np
import pytest

from unet3d.data.case import Case
from unet3d.data.preprocessing import cache as module
from unet3d.data.preprocessing.cache import estimate_cost, lock_cache, preprocess_all
from unet3d.data.preprocessing.fingerprint import (
    fingerprint_dataset,
    foreground_intensities,
    median_spacing,
)
from unet3d.data.preprocessing.pipeline import Preprocessing


def saved(path, array, affine=None):
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def a_case(folder, image, label=None, affine=None, name="case"):
    label = np.zeros(image.shape[:3], np.uint8) if label is None else label
    return Case(
        name=name,
        images=(saved(folder / f"{name}_0000.nii.gz", image, affine),),
        label=saved(folder / f"{name}.nii.gz", label, affine),
    )


def noise(*size, mean=5.0):
    return np.random.default_rng(0).normal(mean, 2, size).astype(np.float32)


def volume_of(case, tmp_path, **settings):
    return preprocess_all([case], Preprocessing(num_classes=2, **settings), tmp_path / "cache")[0]


def framed():
    """Noise within zeros."""
    image = np.zeros((12, 12, 12), np.float32)
    image[2:8, 3:9, 4:12] = noise(6, 6, 8)
    return image


def test_a_volume_is_cropped_to_what_is_not_zero(tmp_path):
    case = a_case(tmp_path, framed())
    assert volume_of(case, tmp_path).image.shape == (1, 6, 6, 8)
    assert volume_of(case, tmp_path, crop="none").image.shape == (1, 12, 12, 12)


def test_zscore_nonzero_leaves_what_is_zero_as_it_is(tmp_path):
    image = volume_of(
        a_case(tmp_path, framed()), tmp_path, crop="none", normalize=("zscore_nonzero",)
    ).image
    assert (image[0, :2] == 0).all()
    inside = image[image != 0]
    assert inside.mean() == pytest.approx(0, abs=1e-5)
    assert inside.std() == pytest.approx(1, abs=1e-5)


def test_ct_is_clipped_and_scaled_by_the_foreground_of_the_data_set(tmp_path):
    image = noise(8, 8, 8)
    label = np.zeros((8, 8, 8), np.uint8)
    label[2:6] = 1
    case = a_case(tmp_path, image, label)
    found = foreground_intensities(fingerprint_dataset([case], "RAS", tmp_path / "cache"))
    there = image[label > 0]
    expected = (there.mean(), there.std(), *np.percentile(there, (0.5, 99.5)))
    np.testing.assert_allclose(found, [expected], rtol=1e-5)
    ready = volume_of(case, tmp_path, normalize=("ct",), intensities=found).image[0]
    clipped = np.clip(image, expected[2], expected[3])
    np.testing.assert_allclose(ready, (clipped - expected[0]) / expected[1], atol=1e-4)


def test_a_fingerprint_tells_sizes_spacings_and_classes_and_is_read_once(tmp_path):
    label = np.zeros((12, 12, 12), np.uint8)
    label[3, 4, 5] = 1
    case = a_case(tmp_path, framed(), label, affine=np.diag([2.0, 1, 1, 1]))
    found = fingerprint_dataset([case], "RAS", tmp_path / "cache")[0]
    assert (found.shape, found.spacing_mm) == ((6, 6, 8), (2.0, 1.0, 1.0))
    assert found.voxels == {0: 287, 1: 1}
    assert found.kept == pytest.approx(288 / 1728)
    assert median_spacing([case], "SRA") == (1.0, 2.0, 1.0)
    kept = [p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("print.json")]
    fingerprint_dataset([case], "RAS", tmp_path / "cache")
    assert kept == [p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("print.json")]


def test_channels_come_from_one_file_or_one_each(tmp_path):
    both = noise(6, 6, 6, 2)
    together = a_case(tmp_path, both)
    apart = Case(
        name="apart",
        images=tuple(saved(tmp_path / f"apart_{c}.nii.gz", both[..., c]) for c in range(2)),
        label=together.label,
    )
    one, other = (volume_of(case, tmp_path).image for case in (together, apart))
    assert one.shape == (2, 6, 6, 6)
    assert np.array_equal(one, other)


def test_the_grid_leads_back_to_the_file(tmp_path):
    affine = nibabel.affines.from_matvec(np.diag([-1.0, 2, 1])[[2, 0, 1]], [1, 2, 3])
    case = a_case(tmp_path, framed(), affine=affine)
    scan = Preprocessing(num_classes=2, spacing_mm=(1.0, 1.0, 1.0)).scan(case.images)
    assert scan.grid.file_shape == (12, 12, 12)
    sizes = [stop - start for start, stop in scan.grid.box]
    assert scan.grid.shape == tuple(
        round(n * s) for n, s in zip(sizes, scan.file_spacing_mm, strict=True)
    )
    assert scan.image.shape[1:] == scan.grid.shape


def test_a_copied_data_set_is_not_prepared_again(tmp_path):
    case = a_case(tmp_path, noise(8, 8, 8))
    (tmp_path / "elsewhere").mkdir()
    moved = Case(
        name="case",
        images=(tmp_path / "elsewhere" / "image.nii.gz",),
        label=tmp_path / "elsewhere" / "label.nii.gz",
    )
    moved.images[0].write_bytes(case.images[0].read_bytes())
    moved.label.write_bytes(case.label.read_bytes())
    assert volume_of(case, tmp_path).folder == volume_of(moved, tmp_path).folder


def test_settings_survive_as_plain_values():
    settings = Preprocessing(
        num_classes=3, spacing_mm=(1.0, 1.0, 2.0), normalize=("ct",), intensities=((1, 2, 3, 4),)
    )
    assert Preprocessing.from_dict(settings.to_dict()) == settings


def test_two_who_want_the_same_case_make_it_once(tmp_path, monkeypatch):
    case, made = a_case(tmp_path, noise(16, 16, 16)), []
    real = module.prepare
    monkeypatch.setattr(module, "preprocess_case", lambda *a: made.append(1) or real(*a))
    threads = [threading.Thread(target=volume_of, args=(case, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_case_that_another_finished_just_before_our_lock_is_taken_as_it_is(tmp_path, monkeypatch):
    folder, real = tmp_path / "case", module.fcntl.flock

    def overtaken(handle, how):
        folder.mkdir()
        real(handle, how)

    monkeypatch.setattr(module.fcntl, "flock", overtaken)
    with lock_cache(folder) as draft:
        assert draft is None
    assert [f.name for f in tmp_path.iterdir()] == ["case"]


def half_written(folder):
    with lock_cache(folder) as draft:
        (draft / "image.npy").write_text("half")
        raise KeyboardInterrupt


def test_what_a_killed_process_left_is_not_taken_for_a_case(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        half_written(tmp_path / "case")
    assert not list(tmp_path.iterdir())
    (tmp_path / ".case").mkdir()
    (tmp_path / ".case" / "image.npy").write_text("half")
    with lock_cache(tmp_path / "case") as draft:
        assert not list(draft.iterdir())
    assert not list((tmp_path / "case").iterdir())


@pytest.mark.parametrize("spacing_mm", [None, (0.5, 1.0, 2.0), (2.0, 2.0, 2.0)])
def test_preparing_takes_no_more_memory_than_was_stated(tmp_path, spacing_mm):
    case = a_case(tmp_path, noise(96, 96, 64))
    settings = Preprocessing(num_classes=2, spacing_mm=spacing_mm)
    stated = estimate_cost(case.images, settings)
    tracemalloc.start()
    volume = preprocess_all([case], settings, tmp_path / "cache")[0]
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.4 * stated.ram < taken <= stated.ram
    assert volume.image.nbytes + volume.label.nbytes == stated.disk
