"""What TensorBoard shows of a run besides its curves."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.__main__ import main
from unet3d.training.loggers import FINAL_METRICS


@pytest.mark.slow
def test_a_log_has_charts_hyperparameters_estimated_kinds_and_final_metrics(small, tmp_path):
    words = ["pool=median", *small, f"hydra.run.dir={tmp_path / 'run'}", "trainer.max_steps=3"]
    assert main(["train", *words, "memory.estimate=true", "evaluation.enabled=true"]) == 0
    log = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    tags = log.Tags()
    assert "custom_scalars__config__" in tags["tensors"]
    assert {"memory/timeline", "memory/layers"} < set(tags["images"])
    assert [[point.step for point in log.Scalars(name)] for name in FINAL_METRICS] == [[3]] * 4
    contents = log.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert all(name.encode() in contents for name in ("pool", *FINAL_METRICS))
    session = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"median" in session
    kinds = [tag for tag in tags["scalars"] if tag.startswith("memory/estimated_kind_mib/")]
    assert len(kinds) > 4
    points = log.Scalars(kinds[0])
    assert [p.step for p in points] == [0, 1, 2]  # from the first step to the last validation
    assert len({p.value for p in points}) == 1
