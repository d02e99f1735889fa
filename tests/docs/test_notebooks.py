"""The notebooks run from their first cell to their last, each in an empty folder."""

import json

import nbclient
import nbformat
import pytest

from tests.docs.helpers.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = ["trainer.max_steps=2", "trainer.num_sanity_val_steps=0", "model.width=4"]
TINY = ["data.layout.num_cases=5", "data.layout.size=[16,16,16]", "data.patch_size=[16,16,16]"]
SHORT = {
    '"trainer.max_steps=80"': json.dumps(SMALL)[1:-1],
    '"trainer.max_steps=60"': json.dumps(SMALL + TINY)[1:-1],
    '("max", "avg", "median", "approx_median")': '("max", "median")',
    "range(10)": "range(5)",
    "(64, 96, 128, 160, 192)": "(64, 96)",
}
"""What is replaced in a notebook so that it ends in seconds."""

PICTURES = {"compare_poolings": 2, "own_data": 1, "will_it_fit": 2}


def test_every_notebook_is_committed_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == list(PICTURES)
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"]]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.long
def test_the_notebooks_run(tmp_path, monkeypatch):
    """One after the other in one process, which imports torch once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebooks = {path.stem: nbformat.reads(path.read_text(), as_version=4) for path in NOTEBOOKS}
    cells = []
    for name, notebook in notebooks.items():
        (tmp_path / name).mkdir()
        start = f"%reset -f\nimport os\nos.chdir({str(tmp_path / name)!r})\ndel os"
        cells += [nbformat.v4.new_code_cell(start), *notebook.cells]
    for cell in cells:
        for long, short in SHORT.items():
            cell.source = cell.source.replace(long, short)
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120).execute()
    for name, notebook in notebooks.items():
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        pictures = [output for output in outputs if "image/png" in output.get("data", {})]
        assert len(pictures) == PICTURES[name]
        assert not [output for output in outputs if output.get("name") == "stderr"]
