"""A folder of the cache is filled once, completely, by one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from unet3d.data.preprocessing.lock import lock_cache


def test_one_of_many_fills_a_folder_and_the_others_use_it(tmp_path):
    made = []

    def make(n):
        with lock_cache(tmp_path / "case") as draft:
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
        with lock_cache(tmp_path / "case") as draft:
            (draft / "image.npy").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_is_not_used_as_a_case(tmp_path):
    (tmp_path / ".case").mkdir()
    (tmp_path / ".case" / "image.npy").write_text("half")
    with lock_cache(tmp_path / "case") as draft:
        assert not list(draft.iterdir())
    assert not list((tmp_path / "case").iterdir())


def test_a_damaged_folder_is_replaced(tmp_path):
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "damaged.npy").write_text("")
    with lock_cache(tmp_path / "case", lambda folder: (folder / "image.npy").exists()) as draft:
        (draft / "image.npy").write_text("")
    assert [path.name for path in (tmp_path / "case").iterdir()] == ["image.npy"]
