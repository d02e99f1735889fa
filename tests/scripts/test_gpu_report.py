"""The GPU report without a GPU: what interruptions cost, and what a rehearsal writes."""

import pytest

from scripts.gpu import report, rows


@pytest.mark.long
def test_a_rehearsal_measures_all_parts_on_a_cpu(tmp_path):
    assert report.main(["--rehearse", "--output", str(tmp_path)]) == 0
    parts = rows.read_parts(tmp_path / "rehearsal.json")
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(
        report.PARTS, "done"
    )
    assert parts["forum"]["rows"]["small, plain modules"]["step_seconds"] > 0
    assert "allocated_error_percent" in next(iter(parts["predict"]["rows"].values()))
    (tuned,) = parts["tuned"]["rows"].items()
    assert tuned[0] == "nnU-Net PlainConvUNet, channels-last"
    assert "predicted" not in tuned[1]
    assert parts["lightning"]["rows"]["fused"]["peak"]
    assert not (report.BENCHMARKS / "rehearsal.json").exists()
