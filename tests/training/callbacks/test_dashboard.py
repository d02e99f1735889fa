"""What TensorBoard shows of a run besides its curves."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.__main__ import main
from unet3d.training.loggers import FINAL_METRICS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(small, tmp_path_factory):
    """Return the log of a run that was evaluated."""
    folder = tmp_path_factory.mktemp("dashboard") / "run"
    words = ["pool=median", *small, f"hydra.run.dir={folder}", "trainer.max_steps=3"]
    assert main(["train", *words, "memory.estimate=true", "evaluation.enabled=true"]) == 0
    return EventAccumulator(str(folder / "tensorboard")).Reload()


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
