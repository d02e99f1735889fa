"""Results of benchmarks have the summaries of their runs."""

import pytest

from scripts.bench.quality_results import summarize
from scripts.docs import tables


@pytest.mark.parametrize("name", ["cpu-quality", "cpu-screen-quality"])
def test_summaries_of_dice_follow_from_the_recorded_runs(name):
    for variants in tables.read_result(name).values():
        for entry in variants.values():
            summary = summarize(entry["rows"])
            assert summary.keys() == entry["summary"].keys()
            assert summary["dice"] == pytest.approx(entry["summary"]["dice"])
