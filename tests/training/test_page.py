"""A run ends with a page that a browser opens without network."""

import json

import pytest

from tests.helpers.browser import needs_browser, open_page, turn_slices
from unet3d.training import run_reports

OPTIONS = ("trainer.max_steps=2", "evaluation.enabled=true", "memory.estimate=true", "logger=none")


@needs_browser
@pytest.mark.slow
def test_the_page_of_a_run_turns_slices_without_network(unet3d, tmp_path):
    assert unet3d(*OPTIONS) == 0
    path = tmp_path / "run" / "report.html"
    with open_page(path.as_uri()) as (page, messages, requests):
        first, last = turn_slices(page)
        assert first != last
        assert page.get_by_role("heading", name="Memory of a step").is_visible()
        assert page.locator("figure svg").count() >= 3
        assert messages == []
        assert [url for url in requests if not url.startswith("blob:")] == [path.as_uri()]


@pytest.mark.slow
def test_an_interrupted_run_has_a_page_with_its_curves(unet3d, tmp_path, capsys):
    assert unet3d("optimizer.lr=1e30", "trainer.max_steps=9", "logger=none") == 4
    page = (tmp_path / "run" / "report.html").read_text()
    assert "stopped after" in page
    assert "output=" in page
    assert json.loads((tmp_path / "run" / "curves.json").read_text())["curves"]["train/lr"]


def test_a_run_does_not_fail_because_of_its_page(unet3d, tmp_path, capsys):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    assert unet3d("logger=none") == 0
    *_, line, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"next: unet3d predict checkpoint={tmp_path}/run ")
    assert line.startswith(f"{tmp_path}/run/report.html was not written: ")
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.slow
def test_a_run_has_a_page_after_its_first_epoch_and_a_page_costs_little_time(
    unet3d, tmp_path, monkeypatch
):
    pages, write = [], run_reports.write_text

    def keep(path, text):
        pages.append(text)
        write(path, text)

    monkeypatch.setattr(run_reports, "write_text", keep)
    monkeypatch.setattr(run_reports, "MAX_TIME_FRACTION", 1e-5)  # however slow the machine is
    options = ("trainer.max_epochs=4", "trainer.max_steps=null", "evaluation.enabled=true")
    assert unet3d(*options, "logger=none", "callbacks.case_images.cases=1") == 0
    running, finished = pages  # the next page is not due before the end
    for part in ("running, 2 steps at", "after 2 steps", 'http-equiv="refresh"', "data:image/png"):
        assert part in running
    assert "finished after 8 steps" in finished
    assert 'http-equiv="refresh"' not in finished
