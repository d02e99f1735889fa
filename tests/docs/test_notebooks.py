"""The notebooks run from their first cell to their last, in an empty folder."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = ["trainer.max_steps=2", "trainer.num_sanity_val_steps=0", "model.width=4"]
TINY = [*SMALL, "data.layout.num_cases=5"]
TINY += ["data.layout.size=[16,16,16]", "data.patch_size=[16,16,16]"]
SHORT = {
    '"trainer.max_steps=80"': json.dumps(SMALL)[1:-1],
    '"trainer.max_steps=60"': json.dumps(TINY)[1:-1],
    "(64, 96, 128, 160, 192)": "(64, 96)",
}
"""What is replaced in a notebook so that it ends in seconds."""

PICTURES = {"compare_poolings": 2, "own_data": 1, "will_it_fit": 2}


def test_every_notebook_is_committed_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == list(PICTURES)
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"]]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.reads(path.read_text(), as_version=4)
    for cell in notebook.cells:
        for long, short in SHORT.items():
            cell.source = cell.source.replace(long, short)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES[path.stem]
    assert not [output for output in outputs if output.get("name") == "stderr"]
