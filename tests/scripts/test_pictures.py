import pytest

from scripts.bench.results import ROOT
from scripts.docs import pictures
from unet3d.__main__ import main


@pytest.mark.slow
def test_the_figures_of_the_documents_are_drawn_by_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["data.layout.num_cases=5", "data.layout.size=[16,16,16]", "data.patch_size=[16,16,16]"]
    limits = ["trainer.max_steps=1", "evaluation.enabled=false", "logger=none"]
    assert main(["train", "-m", "model.width=2,4", "output=runs", *sizes, *limits]) == 0
    pictures.draw_figures(tmp_path / "runs", tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == set(pictures.FIGURES)
    made = {*drawn, *pictures.CATEGORIES, "report.png"}
    assert made < {path.name for path in (ROOT / "docs" / "images").iterdir()}
