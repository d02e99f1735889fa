"""A folder of the cache is filled once, completely, by one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from unet3d.data.preprocessing.entry import lock_cache


def find(folder):
    return folder / "image.npy" if (folder / "image.npy").exists() else None


def test_one_of_many_fills_a_folder_and_the_others_use_it(tmp_path):
    made = []

    def make(n):
        with lock_cache(tmp_path / "case", find) as draft:
            if draft is not None:
                (draft / "image.npy").write_text(str(n))
                made.append(n)
        return (tmp_path / "case" / "image.npy").read_text()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(make, range(8)))
    assert len(made) == 1
    assert results == 8 * [str(made[0])]
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_an_interrupted_folder_is_removed(tmp_path):
    def interrupt():
        with lock_cache(tmp_path / "case", find) as draft:
            (draft / "image.npy").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not list(tmp_path.iterdir())


def test_a_damaged_folder_is_replaced_without_what_a_killed_process_has_left(tmp_path):
    for name in ("case", ".case"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "damaged.npy").write_text("")
    with lock_cache(tmp_path / "case", find) as draft:
        (draft / "image.npy").write_text("")
    assert [path.name for path in (tmp_path / "case").iterdir()] == ["image.npy"]
