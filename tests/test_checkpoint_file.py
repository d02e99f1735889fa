import random
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from unet3d import checkpoint_archive
from unet3d.checkpoint_file import (
    extract_weights,
    load_checkpoint,
    save_checkpoint,
    update_metadata,
)
from unet3d.errors import UsageError


def imported_packages(module):
    """Return the top-level packages that a fresh process has after an import."""
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_reading_a_checkpoint_needs_torch_alone():
    packages = imported_packages("unet3d.checkpoint_file")
    assert "torch" in packages
    assert not packages & {"lightning", "pytorch_lightning", "monai", "hydra", "omegaconf"}


@pytest.mark.parametrize(
    "module", ["inference.predictor", "export.export_checkpoint", "doctor", "dataset_check"]
)
def test_a_workflow_that_trains_nothing_does_not_import_lightning(module):
    packages = imported_packages(f"unet3d.workflows.{module}")
    assert not packages & {"lightning", "pytorch_lightning"}


def test_every_flipped_bit_that_changes_the_content_is_detected(tmp_path):
    path = tmp_path / "x.ckpt"
    content = {"weights": torch.arange(50.0), "name": "a network"}
    save_checkpoint(content, path)
    intact = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        flipped = bytearray(intact)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            loaded = load_checkpoint(path)
        except UsageError:
            continue
        assert loaded["weights"].equal(content["weights"])
        assert loaded["name"] == content["name"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2]])
def test_a_file_that_is_not_a_checkpoint_is_rejected_by_name(tmp_path, content):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load_checkpoint(path)


def test_a_file_whose_content_is_empty_is_rejected_by_name(tmp_path):
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/version", "3")
        archive.writestr("x/data.pkl", "")  # torch raises an EOFError without a message
    with pytest.raises(UsageError, match=r"x\.ckpt cannot be read as a checkpoint: EOFError"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "weight", [torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.complex64), "x", 5]
)
def test_weights_that_are_not_finite_real_tensors_are_rejected(tmp_path, weight):
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        extract_weights(tmp_path / "x.ckpt", {"state_dict": {"a": torch.ones(2), "b": weight}})


def test_metadata_is_added_and_the_weights_are_unchanged(tmp_path):
    path = tmp_path / "x.ckpt"
    save_checkpoint({"unet3d": {"a": 1}, "state_dict": {"w": torch.arange(3.0)}}, path)
    update_metadata(path, {"b": [2]})
    content = load_checkpoint(path)
    assert content["unet3d"] == {"a": 1, "b": [2]}
    assert content["state_dict"]["w"].tolist() == [0, 1, 2]


class Attack:
    """An object whose pickle is a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def share(levels):
    value = [0] * 10
    for _ in range(levels):
        value = [value] * 10
    return value


def make_names(**attributes):
    names = OrderedDict(w=torch.zeros(1))
    names.__dict__.update(attributes)
    return names


ASSIGN = {"": {"version": 1, "assign_to_params_buffers": True}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: make_names(get=1), "attributes other than the versions of modules"),
        (lambda: make_names(_metadata=ASSIGN), "attributes other than the versions"),
        (lambda: make_names(_metadata={"": 1}), "attributes other than the versions"),
        (lambda: make_names(_metadata=[]), "attributes other than the versions"),
        (lambda: Attack(bytearray, 2**40), "holds a builtins.bytearray|holds a __builtin__"),
        (lambda: Attack(torch.Size, (-1,)), "a size is not a tuple"),
        (lambda: torch.zeros(3).to_sparse(), "holds a torch._utils._rebuild_sparse"),
        (lambda: torch.zeros(3, device="meta"), "holds a torch._utils._rebuild_meta"),
        (lambda: torch.zeros(3, dtype=torch.complex64), "holds a torch.ComplexFloatStorage"),
        (lambda: torch.zeros(3).to(torch.float8_e5m2), "holds a torch._utils._rebuild_tensor_v3"),
        (lambda: torch.zeros(1).expand(5), "overlaps itself"),
        (lambda: torch.zeros(9).as_strided((3, 3), (1, 2)), "overlaps itself"),
        (lambda: torch.zeros(3).untyped_storage(), "holds a torch.storage.UntypedStorage"),
        (lambda: nest(60), "nested more than 50 deep"),
        (lambda: nest(400), "nested more than 50 deep"),
        (lambda: share(7), "more than 1,000,000 values"),
        (lambda: {(1, 2): 3}, "a key is not a name but a tuple"),
        (lambda: {None: 3}, "a key is not a name but a NoneType"),
        (lambda: {1, 2}, "holds a __builtin__.set"),
        (lambda: b"bytes", "holds a bytes"),
    ],
)
def test_what_is_neither_plain_nor_a_dense_tensor_is_refused_unbuilt(tmp_path, value, message):
    torch.save({"state_dict": value()}, tmp_path / "x.ckpt")
    with pytest.raises(UsageError, match=rf"x\.ckpt cannot be read as a checkpoint: .*({message})"):
        load_checkpoint(tmp_path / "x.ckpt")


def test_what_checkpoints_of_other_projects_hold_is_read(tmp_path):
    content = {
        "score": np.float64(0.5),
        "device": torch.device("cuda", 1),
        "milestones": Counter([3, 3, 5]),
        "size": torch.Size([1, 2]),
        "weights": torch.nn.Linear(2, 3).state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "view": torch.arange(12.0).view(3, 4).t()[1:],
        "flags": torch.ones(2, dtype=torch.bool),
        "a": {1: (2, [None, True, -(2**40), 1e300, "ö"])},
    }
    torch.save(content, tmp_path / "x.pth")
    loaded = load_checkpoint(tmp_path / "x.pth")
    assert loaded["view"].equal(content["view"])
    plain = ("score", "device", "milestones", "size", "a")
    assert [loaded[key] for key in plain] == [content[key] for key in plain]


def rewrite(path, change):
    """Write the archive again, with entries that `change` makes of (name, content)."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that are there already
        for name, content, *compression in change(entries):
            archive.writestr(name, content, *compression)


def rewrite_bytes(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def rewrite_structure(structure):
    return lambda p: rewrite(
        p, lambda es: [(n, structure if n.endswith("data.pkl") else c) for n, c in es]
    )


def rename_storage(name):
    """Name the first storage so, in the structure and as an entry."""
    text = b"X" + struct.pack("<I", len(name.encode())) + name.encode()

    def change(entries):
        for entry, content in entries:
            if entry.endswith("data.pkl"):
                content = content.replace(b"X\x01\x00\x00\x000", text)
            yield entry.replace("/data/0", f"/data/{name}"), content

    return lambda p: rewrite(p, change)


DEFLATED = zipfile.ZIP_DEFLATED
ARCHIVES = {
    "compressed": (
        lambda p: rewrite(p, lambda es: [(n, c, DEFLATED) for n, c in es]),
        "is compressed, which torch.save never does",
    ),
    "a name twice": (lambda p: rewrite(p, lambda es: [*es, es[-1]]), "have the same name"),
    "a name in capitals": (
        lambda p: rewrite(p, lambda es: [*es, (es[0][0].upper(), b"")]),
        "two entries have the same name",
    ),
    "a name that is not ASCII": (rename_storage("é"), "'archive/data/é' is not in ASCII"),
    "a storage with a name": (rename_storage("x"), "a storage is not described as torch.save does"),
    "another folder": (
        lambda p: rewrite(p, lambda es: [*es, ("other/data.pkl", es[0][1])]),
        "its entries are not in one folder",
    ),
    "a short storage": (
        lambda p: rewrite(p, lambda es: [(n, c[:8] if n[-7:] == "/data/0" else c) for n, c in es]),
        "the storage 0 is not in the file with the size it declares",
    ),
    "no storage": (
        lambda p: rewrite(p, lambda es: [e for e in es if not e[0].endswith("/data/0")]),
        "the storage 0 is not in the file with the size it declares",
    ),
    "a file before it": (rewrite_bytes(lambda raw: b"before" + raw), "overlaps another entry"),
    "a file behind it": (rewrite_bytes(lambda raw: raw + b"behind"), "follows its directory"),
    "an archive behind it": (rewrite_bytes(lambda raw: raw * 2), "overlaps another entry"),
    "a comment": (
        rewrite_bytes(lambda raw: raw[:-2] + b"\x02\x00ab"),
        "something follows its directory",
    ),
    "another directory": (
        rewrite_bytes(lambda raw: raw[:-34] + b"\0" * 8 + raw[-26:]),
        "it has two directories",
    ),
    "a huge structure": (
        lambda p: rewrite(p, lambda es: [(n, c.ljust(2**25 * n.endswith("pkl"))) for n, c in es]),
        "its structure takes more than 16,777,216 bytes",
    ),
    "deep values": (
        rewrite_structure(b"\x80\x02" + b"]" * 9**5 + b"a" * (9**5 - 1) + b"."),
        "its values are nested more than 50 deep",
    ),
    "a loop": (rewrite_structure(b"\x80\x02]q\0h\0a."), "its values are nested more than 50 deep"),
    "more than one object": (
        rewrite_structure(b"\x80\x02}}."),
        "its structure holds more than one object",
    ),
    "an open mark": (rewrite_structure(b"\x80\x02(}."), "its structure holds more than one object"),
    "a declared size": (
        rewrite_structure(b"\x80\x02\x8b\xff\xff\xff\x7f."),
        r"its structure cannot be read \(KeyError\)",
    ),
}
"""Archives that readers read differently, or that declare more than they hold; and why not."""


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_that_torch_would_not_write_is_refused(tmp_path, kind):
    path = tmp_path / "x.ckpt"
    save_checkpoint({"w": torch.arange(50.0), "v": torch.arange(9)}, path)
    change, reason = ARCHIVES[kind]
    change(path)
    with pytest.raises(UsageError, match=rf"x\.ckpt .*{reason}") as raised:
        load_checkpoint(path)
    assert "\n" not in str(raised.value)


def test_what_a_structure_builds_is_counted_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_archive, "MAX_OPERATIONS", 1000)
    path = tmp_path / "x.ckpt"
    save_checkpoint({}, path)
    rewrite_structure(b"\x80\x02" + b"}" * 1000)(path)
    with pytest.raises(UsageError, match="its structure has more than 1,000 operations"):
        load_checkpoint(path)


def test_metadata_is_not_added_to_a_file_that_is_not_plain(tmp_path):
    torch.save({"unet3d": {}, "w": torch.zeros(1).expand(5)}, tmp_path / "x.ckpt")
    with pytest.raises(UsageError, match="overlaps itself"):
        update_metadata(tmp_path / "x.ckpt", {"a": 1})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow text only")
def test_a_checkpoint_may_lie_in_a_folder_whose_name_is_not_text(tmp_path):
    path = tmp_path / "é\udcff" / "a.ckpt"
    path.parent.mkdir()
    save_checkpoint({"unet3d": {}, "state_dict": {"a": torch.ones(2)}}, path)
    assert load_checkpoint(path)["state_dict"]["a"].tolist() == [1, 1]
