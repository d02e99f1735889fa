"""`unet3d view`: volumes on one grid, their classes, and the page in a browser."""

import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import nibabel
import numpy as np
import pytest

from tests.helpers.browser import needs_browser, open_page, turn_slices
from unet3d.errors import UsageError
from unet3d.report.html.viewer import read_script
from unet3d.report.slices import get_palette
from unet3d.workflows.view import build_server, read_case

ROOT = Path(__file__).parents[2]


def save(path, volume, spacing_mm=(1.0, 2.0, 3.0)):
    path.parent.mkdir(exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([*spacing_mm, 1.0])), path)
    return path


@pytest.fixture
def files(tmp_path):
    """An image of two channels, and two label files of the same name."""
    image = np.random.default_rng(0).normal(size=(12, 10, 8, 2)).astype(np.float32)
    labels = np.zeros((12, 10, 8), np.uint8)
    labels[2:6, 3:7, 2:5], labels[6:9, 3:7, 2:6] = 1, 5
    return [
        save(tmp_path / "image.nii.gz", image),
        save(tmp_path / "reference" / "x.nii.gz", labels),
        save(tmp_path / "prediction" / "x.nii.gz", np.roll(labels, 1, 0)),
    ]


def test_labels_are_named_by_file_and_classes_by_number(files):
    image, *labels = files
    case = read_case(image, labels, channel=1)
    assert list(case.layers) == ["reference/x", "prediction/x"]
    assert list(case.classes) == ["1", "5"]
    assert set(np.unique(case.layers["reference/x"])) == {0, 1, 2}
    assert case.shape == (12, 10, 8)
    assert case.spacing_mm == (1.0, 2.0, 3.0)
    assert not np.array_equal(case.image, read_case(image, [], channel=0).image)


def test_classes_have_the_names_of_a_dataset_beside_them(files):
    (files[1].parent / "dataset.json").write_text('{"labels": {"liver": 1, "tumor": 5}}')
    assert list(read_case(files[0], files[1:], channel=0).classes) == ["liver", "tumor"]


def test_empty_labels_and_no_labels_can_be_shown(files):
    empty = save(files[0].with_name("empty.nii.gz"), np.zeros((12, 10, 8), np.uint8))
    assert not read_case(files[0], [empty], channel=0).layers["empty"].any()
    assert read_case(files[0], [], channel=0).layers == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "labels must be on the grid of the image"),
        ("moved", "labels must be on the grid of the image"),
        ("image", "different values: is it an image?"),
        ("missing", "is missing"),
    ],
)
def test_what_is_no_label_file_of_the_image_is_refused(files, name, message):
    folder = files[0].parent
    save(folder / "cut.nii.gz", np.zeros((12, 10, 7), np.uint8))
    save(folder / "moved.nii.gz", np.zeros((12, 10, 8), np.uint8), (1.0, 1.0, 1.0))
    scan = np.arange(960).reshape(12, 10, 8).astype(np.int16)
    one = save(folder / "one.nii.gz", scan)
    wrong = one if name == "image" else folder / f"{name}.nii.gz"
    with pytest.raises(UsageError, match=message):
        read_case(one, [wrong], channel=0)
    with pytest.raises(UsageError, match="channels 0 to 1"):
        read_case(files[0], [], channel=2)


def test_a_port_in_use_is_an_error_of_one_line(files):
    with (
        build_server(files[0], [], channel=0, port=0) as first,
        pytest.raises(UsageError, match=f"port={first.server_port} cannot be used"),
    ):
        build_server(files[0], [], channel=0, port=first.server_port)


@contextmanager
def serve(files):
    with build_server(files[0], files[1:], channel=0, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@needs_browser
@pytest.mark.slow
def test_the_viewer_turns_slices_and_asks_for_nothing_but_its_volumes(files):
    with serve(files) as server, open_page(server.url) as (page, messages, requests):
        assert page.locator("#viewer").get_attribute("data-ready") == "niivue"
        first, last = turn_slices(page)
        assert first != last
        page.get_by_role("button", name="prediction/x").click()
        page.wait_for_timeout(300)
        assert page.locator("#viewer canvas").screenshot() != last
        assert messages == []
        own = [url for url in requests if not url.startswith("blob:")]
        assert own == [server.url, *(f"{server.url}{n}" for n in range(3))]


@needs_browser
@pytest.mark.slow
def test_the_viewer_opens_at_the_slice_with_most_labels(files):
    """The one file has its labels in one slice, and the last file is empty."""
    empty = save(files[0].with_name("empty.nii.gz"), np.zeros((12, 10, 8), np.uint8))
    full = np.zeros((12, 10, 8), np.uint8)
    full[1:9, 1:9, 6] = 1
    more = save(files[0].with_name("more.nii.gz"), full)
    with serve([*files, more, empty]) as server, open_page(server.url) as (page, _, _):
        assert page.locator("#viewer").get_attribute("data-slice") == "6"


def test_errors_have_colors_that_no_class_has():
    errors = re.findall(r'name: ".*", color: "#(......)"', read_script())
    assert len(errors) == 3
    colors = [np.array([int(c[i : i + 2], 16) for i in (0, 2, 4)]) for c in errors]
    classes = list(255 * get_palette(11)[1:])
    for n, color in enumerate(colors):
        distances = [np.linalg.norm(color - other) for other in [*classes, *colors[:n]]]
        assert min(distances) > 100


@pytest.mark.slow
def test_ctrl_c_ends_the_command(files):
    words = [*map(str, files), "open_browser=false"]
    command = [sys.executable, "-W", "ignore", "-m", "unet3d.cli.main", "view", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        with urlopen(url, timeout=10) as answer:
            assert b"viewer-cases" in answer.read()
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
        assert (process.returncode, errors) == (130, "interrupted\n")
