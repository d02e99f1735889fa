"""The page of an evaluation, with its worst cases in the viewer."""

import numpy as np
import pytest

from tests.contract.helpers.datasets import save
from tests.helpers.browser import needs_browser, open_page
from unet3d.__main__ import main
from unet3d.report.evaluation import iter_worst_cases, read_result, try_write_evaluation_page


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
        for kind, volume in {"r": reference, "p": predicted}.items():
            save(tmp_path / kind / f"{name}.nii.gz", volume, left)
        turned = (image + 3 * reference)[::-1, ::-1]  # images may be stored along other axes
        save(tmp_path / "i" / f"{name}.nii.gz", turned, left @ np.diag([-1, -1, 1, 1]))
    words = ["predictions=p", "references=r", "images=i", "output=out"]
    assert main(["evaluate", *words]) == 0
    return tmp_path / "out"


def test_the_worst_case_is_first_and_turned_to_right_anterior_superior(folder):
    result = read_result(folder / "evaluation.json")
    worst, best = iter_worst_cases(result)
    assert (worst.name, best.name) == ("b", "a")
    assert worst.title.startswith("b: Dice 0.9")
    assert worst.image.shape == (14, 16, 10)
    assert worst.spacing_mm == (1.0, 1.0, 2.0)
    reference, prediction, errors = (layer.labels for layer in worst.layers.values())
    filled = np.flatnonzero(reference.any((1, 2)))
    assert (filled.min(), filled.max()) == (8, 11)  # 2..5 from the other side
    assert worst.image[reference > 0].mean() > worst.image[reference == 0].mean() + 50
    assert (reference > prediction).sum() == (errors == 1).sum() == errors.sum()  # missed
    assert set(np.flatnonzero(errors.any((0, 1)))) == {4}


@needs_browser
@pytest.mark.slow
def test_without_webgl_the_page_shows_pictures(folder):
    page_file = folder / "report.html"
    text = page_file.read_text()
    page_file.write_text(text.replace('getContext("webgl2")', 'getContext("none")'))
    with open_page(page_file.as_uri(), ready="#pictures img") as (page, messages, requests):
        assert page.locator("#pictures img").count() == 2
        assert page.get_by_text("needs WebGL 2").is_visible()
        assert (messages, requests) == ([], [page_file.as_uri()])


def test_a_script_in_the_name_of_a_case_is_text(folder):
    """In the elements of the page, and in the data of the viewer."""
    name = "</script><script>document.title = 'run'</script>"
    result = read_result(folder / "evaluation.json")
    result["cases"] = {name if n == "b" else n: scores for n, scores in result["cases"].items()}
    result["worst"][0]["case"] = name
    assert try_write_evaluation_page(result, folder, "unet3d evaluate", print)
    page = (folder / "report.html").read_text()
    assert "script><script" not in page
    assert "&lt;/script&gt;&lt;script&gt;document" in page
    assert r"\u003c/script\u003e\u003cscript\u003edocument" in page
