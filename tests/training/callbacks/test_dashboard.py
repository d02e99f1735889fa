"""What users see of a sweep: in TensorBoard, and in the comparison of its runs."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.__main__ import main
from unet3d.training.loggers import FINAL_METRICS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweep(small, tmp_path_factory):
    """Train two runs."""
    folder = tmp_path_factory.mktemp("dashboard")
    words = ["-m", "pool=max,median", *small, f"hydra.sweep.dir={folder / 'sweep'}"]
    words += ["memory.estimate=true", "evaluation.enabled=true", "trainer.max_steps=3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", *words]) == 0
    return folder / "sweep"


@pytest.fixture(scope="module")
def log(sweep):
    return EventAccumulator(str(sweep / "1" / "tensorboard")).Reload()


def test_a_log_has_charts_images_and_final_metrics(log):
    tags = log.Tags()
    assert "custom_scalars__config__" in tags["tensors"]
    assert {"memory/timeline", "memory/layers"} < set(tags["images"])
    assert [[point.step for point in log.Scalars(name)] for name in FINAL_METRICS] == [[3]] * 4


def test_a_log_lists_its_hyperparameters_and_final_metrics_from_the_start(log):
    contents = log.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert all(name.encode() in contents for name in ("pool", *FINAL_METRICS))
    session = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"median" in session


def test_estimated_kinds_are_constant_from_the_first_step_to_the_last_validation(log):
    kinds = [t for t in log.Tags()["scalars"] if t.startswith("memory/estimated_kind_mib/")]
    assert len(kinds) > 4
    points = log.Scalars(kinds[0])
    assert [p.step for p in points] == [0, 1, 2]
    assert len({p.value for p in points}) == 1
