"""The page of an evaluation, with its worst cases in the viewer."""

import re

import nibabel
import numpy as np
import pytest

from tests.helpers.browser import needs_browser, open_page, turn_slices
from unet3d.cli.main import main
from unet3d.workflows.evaluation.page import iter_worst_cases, read_result


def save(path, volume, affine=None):
    path.parent.mkdir(exist_ok=True)
    nibabel.save(
        nibabel.Nifti1Image(volume, np.diag([1.0, 1.0, 2.0, 1.0]) if affine is None else affine),
        path,
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two cases on axes to the left; the class is missed in one slice of b."""
    monkeypatch.chdir(tmp_path)
    left = np.diag([-1.0, 1.0, 2.0, 1.0])
    for name in "ab":
        reference = np.zeros((14, 16, 10), np.uint8)
        reference[2:6, 4:12, 2:8] = 1
        predicted = reference.copy()
        predicted[:, :, 4] = 0 if name == "b" else predicted[:, :, 4]
        image = np.random.default_rng(0).normal(size=reference.shape).astype(np.float32)
        for kind, volume in {"r": reference, "p": predicted, "i": image + 3 * reference}.items():
            save(tmp_path / kind / f"{name}.nii.gz", volume, left)
    words = ["predictions=p", "references=r", "images=i", "output=out"]
    assert main(["evaluate", *words]) == 0
    return tmp_path / "out"


def test_the_worst_case_is_first_and_turned_to_right_anterior_superior(folder):
    result = read_result(folder / "evaluation.json")
    worst, best = iter_worst_cases(result)
    assert (worst.name, best.name) == ("b", "a")
    assert worst.title.startswith("b: 0.9")
    assert worst.shape == (14, 16, 10)
    assert worst.spacing_mm == (1.0, 1.0, 2.0)
    filled = np.flatnonzero(worst.layers["reference"].any((1, 2)))
    assert (filled.min(), filled.max()) == (8, 11)  # 2..5 from the other side
    assert worst.image[9, 8, 5] > 1  # the image is turned with it
    missed = worst.layers["reference"] > worst.layers["prediction"]
    assert set(np.flatnonzero(missed.any((0, 1)))) == {4}
    assert worst.notes["1"].startswith("Dice 0.9")


def test_an_evaluation_whose_page_cannot_be_written_ends_as_without_it(folder, capsys):
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert main(["evaluate", "predictions=p", "references=r", "output=out"]) == 0
    assert "out/report.html was not written: " in capsys.readouterr().err


@needs_browser
@pytest.mark.slow
def test_without_niivue_the_page_draws_slices_itself(folder):
    page_file = folder / "report.html"
    text = page_file.read_text()
    assert text.count('id="niivue"') == 1
    page_file.write_text(text.replace('id="niivue"', 'id="other"'))
    with open_page(page_file.as_uri()) as (page, messages, requests):
        viewer = page.locator("#viewer")
        assert viewer.get_attribute("data-ready") == "slices"
        assert viewer.get_attribute("data-slice") == "4"  # where the errors are
        first, last = turn_slices(page)
        assert first != last
        page.locator("#viewer canvas").hover()
        page.mouse.wheel(0, 100)
        page.wait_for_timeout(100)
        assert viewer.get_attribute("data-slice") == "8"
        page.get_by_role("button", name="a: 1.000").click()
        page.locator("#viewer[data-ready]").wait_for()
        assert page.locator("#viewer canvas").screenshot() != last
        assert messages == []
        assert requests == [page_file.as_uri()]


@needs_browser
@pytest.mark.slow
def test_a_script_in_a_name_does_not_run_in_the_browser(folder):
    """Even if it were not escaped: the policy allows the page's own script only."""
    page_file = folder / "report.html"
    evil = "<script>document.title = 'run'</script>"
    text = page_file.read_text()
    data = re.search(r'<script type="application/json" id="viewer-cases">.*?</script>', text)
    cases = data[0].replace('"b: 0.', '"\\u003cimg src=x onerror=alert(1)>b: 0.')
    page_file.write_text(text.replace(data[0], cases).replace("<main>", f"<main>{evil}"))
    with open_page(page_file.as_uri()) as (page, messages, requests):
        assert page.title() != "run"
        assert any("Content Security Policy" in message for message in messages)
        assert page.get_by_text("<img src=x").is_visible()
        assert requests[0] == page_file.as_uri()
        assert all(url.startswith("blob:") for url in requests[1:])
