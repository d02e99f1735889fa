"""A folder belongs to one run: at a time, and at all times."""

import signal
from pathlib import Path

import pytest

from unet3d.__main__ import main
from unet3d.files import replace_with_copy
from unet3d.training.run_folder import LOCK

pytestmark = pytest.mark.slow


def read_all(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture
def used(unet3d, tmp_path):
    """Return the folder of a run with checkpoints, predictions and scores."""
    assert unet3d("evaluation.enabled=true", "logger=csv") == 0
    return tmp_path / "run"


def test_a_link_to_a_folder_leads_to_the_latest_run(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "a")
    for _ in range(2):
        assert main(["train", *small, "hydra.run.dir=run", "logger=csv"]) == 0
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"a", "a.1"}
    assert (tmp_path / "run").is_symlink()
    assert not list(tmp_path.rglob(LOCK))


def test_a_run_that_is_refused_leaves_the_earlier_one_in_its_folder(unet3d, used):
    before = read_all(used)
    for word in ("resume=atuo", f"init_from={used / 'checkpoints/last.ckpt'}", "freeze=[nope]"):
        assert unet3d(word) == 2
        assert read_all(used) == before
    assert not used.with_name("run.1").exists()


def test_what_a_kill_left_of_checkpoints_is_removed_when_the_run_goes_on(unet3d, used, monkeypatch):
    checkpoints = used / "checkpoints"
    before = set(checkpoints.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr(Path, "replace", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            replace_with_copy(checkpoints / "last.ckpt", checkpoints / "previous.ckpt")
    assert len(set(checkpoints.iterdir()) - before) == 1
    assert unet3d("logger=csv", "evaluation.enabled=true", "resume=auto") == 0
    assert set(checkpoints.iterdir()) == before


def test_a_search_in_the_folder_of_a_run_is_refused(small, used, capsys):
    before = read_all(used)
    assert main(["search", *small, "space={pool:[max,avg]}", f"hydra.run.dir={used}"]) == 2
    assert "holds a run, not a search" in capsys.readouterr().err
    assert read_all(used) == before
