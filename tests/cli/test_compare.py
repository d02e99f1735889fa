import json

import pytest

from tests.report.test_run_comparison import report
from unet3d.cli.main import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs whose folders have odd names."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "it's (1), a=b": report(0.7, 100, 1.0),
        "other": report(0.9, 50, 1.0, pool="median"),
    }.items():
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(content))
    return tmp_path


def test_runs_are_named_by_folders_in_any_spelling(runs, capsys):
    assert main(["compare", "outputs/it's (1), a=b", "outputs/other"]) == 0
    by_name = capsys.readouterr().out
    assert main(["compare", "outputs"]) == 0
    assert main(["compare", "outputs/*"]) == 0
    assert capsys.readouterr().out == by_name * 2
    assert "0.9000 [0.8000, 1.0000]" in by_name
    assert "unbeaten" in by_name


def test_the_table_can_be_json_and_a_picture(runs, capsys):
    assert main(["compare", "outputs", "format=json", "output=c.json", "picture=a b.png"]) == 0
    best, other = json.loads((runs / "c.json").read_text())
    assert best["unbeaten"]
    assert not other["unbeaten"]
    assert best["differs"] == {"pool": "median"}
    assert (runs / "a b.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "unet3d compare RUN"),
        (["none"], "there is no none"),
        (["."], "there is no run in"),
        (["outputs", "format=xml"], "format must be one of table, json"),
        (["outputs", "pictures=a.png"], "did you mean picture?"),
        (["outputs", "picture=none/a.png"], "none"),
    ],
)
def test_misuse_is_told_in_a_line(runs, words, said, capsys):
    if words == ["."]:
        (runs / "outputs").rename(runs.parent / "elsewhere")
    assert main(["compare", *words]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_folder_without_a_run_is_named_and_the_others_are_shown(runs, capsys):
    (runs / "empty").mkdir()
    assert main(["compare", "outputs", "empty"]) == 1
    shown = capsys.readouterr()
    assert "empty: no report.json" in shown.err
    assert "outputs/other" in shown.out
