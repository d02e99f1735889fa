"""Generate corrupted inputs: valid volumes, listings, experiments and checkpoints with one defect.

Inputs that nobody can tell from valid ones are not included, such as a header with another valid
spacing or with another data type of the same size.
"""

import gzip
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import nibabel
import torch

Corrupt = Callable[[Path, Random], None]

HEADER: dict[str, list[Any]] = {
    "sizeof_hdr": [0, 347, 540, 2**31 - 1],
    "dim": [
        *([n, 20, 18, 16, 1, 1, 1, 1] for n in (0, 1, 2, 8, -1, 255)),
        *([3, n, 18, 16, 1, 1, 1, 1] for n in (0, -5, 1, 19, 21, 40, 32767)),
        *([3, 20, 18, n, 1, 1, 1, 1] for n in (15, 17, 0)),
        *([4, 20, 18, 16, n, 1, 1, 1] for n in (0, 2, -1, 32767)),
        [5, 20, 18, 8, 1, 2, 1, 1],
        [3, 18, 20, 16, 1, 1, 1, 1],
        [7, 32767, 32767, 32767, 32767, 32767, 32767, 32767],
    ],
    "datatype": [0, 1, 128, 32, 1792, 999, -1, 2, 64, 256, 4, 1536],
    "pixdim": [
        *([1, n, 1, 1, 0, 0, 0, 0] for n in (float("nan"), float("inf"), 0, -1, 1e30)),
        [float("nan"), 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ],
    "vox_offset": [-352, -1, 0, 348, 351, 356, 416, 1e9, float("inf"), float("nan")],
    "scl_slope": [float("nan"), float("inf"), float("-inf"), 0],
    "scl_inter": [float("nan"), float("inf")],
    "sform_code": [0, -1, 99],
    "srow_x": [[float("nan")] * 4, [float("inf")] * 4, [0, 0, 0, 0], [1e30, 0, 0, 0], [0, 1, 0, 0]],
    "magic": [b"", b"ni1", b"n+2", b"xyz"],
}


@dataclass(frozen=True)
class Input:
    """A corrupted input and the command that gets it."""

    kind: str
    name: str
    command: str
    corrupt: Corrupt
    overrides: tuple[str, ...] = ()
    may_be_harmless: bool = True  # the command may accept it if it reads the original content
    keys: frozenset[str] = frozenset()  # that the input sets, so that overrides must not


def generate_inputs(seed: int) -> Iterator[Input]:
    """Yield all inputs, the same ones for the same seed."""
    rng = Random(seed)
    yield from _headers(rng)
    yield from _gzip_files()
    yield from _special_files()
    yield from _listings()
    yield from _experiments()
    yield from _checkpoints()


def change_uncompressed(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change the uncompressed bytes of a .nii.gz."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    change(content)
    path.write_bytes(gzip.compress(bytes(content)))


VOLUMES = {
    "check": ("set/imagesTr/case_001.nii.gz", "set/labelsTr/case_001.nii.gz"),
    "train": ("set/imagesTr/case_002.nii.gz", "set/labelsTr/case_002.nii.gz"),
    "predict": ("scans/a.nii.gz",),
    "evaluate": ("predictions/case_001.nii.gz",),
}


def _headers(rng: Random) -> Iterator[Input]:
    """Yield each value of each field for `check`, and for some a random other command."""
    for field, values in HEADER.items():
        for value in values:
            for command in ("check", rng.choice(["train", "predict", "evaluate"])):
                if command == "predict" and field in ("sform_code", "dim"):
                    command = "evaluate"  # valid for an image without labels
                path = rng.choice(VOLUMES[command])

                def corrupt(root: Path, _: Random, path=path, field=field, value=value) -> None:
                    def change(content: bytearray) -> None:
                        header = nibabel.Nifti1Header(bytes(content[:348]), check=False)
                        header[field] = value
                        content[:348] = header.binaryblock

                    change_uncompressed(root / path, change)

                if rng.random() < (1.0 if command == "check" else 0.45):
                    yield Input("NIfTI header", f"{field}={value} in {path}", command, corrupt)
    for command in ("check", "predict"):
        path = VOLUMES[command][0]
        for name, change in {
            "sizeof_hdr byte-swapped": lambda c: c.__setitem__(slice(0, 4), c[:4][::-1]),
            "dim byte-swapped": lambda c: c.__setitem__(slice(40, 56), _swap_bytes(c[40:56])),
            "an extension without an end": lambda c: c.__setitem__(slice(348, 352), b"\1\0\0\0"),
            "random header": lambda c: c.__setitem__(slice(4, 348), Random(7).randbytes(344)),
        }.items():
            yield Input(
                "NIfTI header",
                name,
                command,
                lambda r, _, p=path, c=change: change_uncompressed(r / p, c),
            )


def _swap_bytes(content: bytes) -> bytes:
    return b"".join(content[i : i + 2][::-1] for i in range(0, len(content), 2))


def _gzip_files() -> Iterator[Input]:
    def cut(fraction: float) -> Callable[[bytes], bytes]:
        return lambda b: b[: int(len(b) * fraction)]

    def flip_bit(at: float | int) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            offset = at if isinstance(at, int) else int(at * len(content))
            changed = bytearray(content)
            changed[offset] ^= 0x10
            return bytes(changed)

        return change

    changes: dict[str, Callable[[bytes], bytes]] = {
        "cut at 10 %": cut(0.1),
        "cut at 99 %": cut(0.99),
        "last byte missing": lambda b: b[:-1],
        "checksum missing": lambda b: b[:-8],
        "checksum flipped": flip_bit(-6),
        "length flipped": flip_bit(-2),
        "bit flipped at 50 %": flip_bit(0.5),
        "bit flipped at 90 %": flip_bit(0.9),
        "bit flipped near the end": flip_bit(-12),
        "trailing garbage": lambda b: b + b"garbage",
        "a second gzip member": lambda b: b + gzip.compress(b"x" * 400),
        "empty": lambda b: b"",
        "not compressed": gzip.decompress,
        "compressed twice": gzip.compress,
    }
    for command, paths in VOLUMES.items():
        for number, (name, change) in enumerate(changes.items()):
            path = paths[number % len(paths)]

            def corrupt(root: Path, _: Random, path=path, change=change) -> None:
                (root / path).write_bytes(change((root / path).read_bytes()))

            if command in ("check", "predict") or number % 2 == (command == "train"):
                yield Input("gzip", f"{name}: {path}", command, corrupt)


def _special_files() -> Iterator[Input]:
    def replace(make: Callable[[Path], Any]) -> Corrupt:
        def corrupt(root: Path, _: Random) -> None:
            for path in ("set/imagesTr/case_001.nii.gz", "scans/a.nii.gz"):
                (root / path).unlink()
                make(root / path)

        return corrupt

    changes = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a link to /dev/zero": lambda p: p.symlink_to("/dev/zero"),
        "a link to itself": lambda p: p.symlink_to(p),
    }
    for name, make in changes.items():
        for command in ("check", "predict"):
            yield Input("special file", f"{name} for a volume", command, replace(make))


def _listings() -> Iterator[Input]:
    def change_listing(change: Callable[[dict], Any]) -> Corrupt:
        def corrupt(root: Path, _: Random) -> None:
            path = root / "set" / "dataset.json"
            content = json.loads(path.read_text())
            changed = change(content)
            path.write_text(json.dumps(content if changed is None else changed))

        return corrupt

    def set_entry(key: str, value: Any) -> Callable[[dict], Any]:
        return lambda c: c["training"][0].__setitem__(key, value)

    def set_key(key: str, value: Any) -> Callable[[dict], Any]:
        return lambda c: c.__setitem__(key, value)

    names = {"0": "background", "1": "a", "2": "b"}
    changes: dict[str, Callable[[dict], Any]] = {
        "a list": lambda c: [c],
        "no labels": lambda c: c.pop("labels") and None,
        "no training": lambda c: c.pop("training") and None,
        **{f"labels {v!r}"[:40]: set_key("labels", v) for v in (5, None, [], "x", {"1": "a"})},
        "two classes with one name": set_key("labels", {**names, "2": "a"}),
        "a class with a slash": set_key("labels", {**names, "2": "a/b\n"}),
        "a surrogate in a name": set_key("labels", {**names, "2": "\ud800"}),
        "an escape code in a name": set_key("labels", {**names, "2": "\x1b[2J"}),
        "a missing class": set_key("labels", {"0": "background", "1": "a"}),
        **{f"modality {v!r}"[:40]: set_key("modality", v) for v in (7, {}, {"1": "MRI"}, [["0"]])},
        **{
            f"training {v!r}"[:40]: set_key("training", v)
            for v in (5, {}, [1, None], [[[]]], "abc")
        },
        **{
            f"image {v!r}"[:40]: set_entry("image", v)
            for v in (
                *(5, None, "", ".", "..", "../../../../etc/passwd", "/dev/zero", "a\0b.nii.gz"),
                *("x" * 5000 + ".nii.gz", "\ud800.nii.gz", ["a"], "imagesTr"),
            )
        },
        "an image listed twice": lambda c: c["training"].append(c["training"][0]),
        "numTraining NaN": set_key("numTraining", float("nan")),
    }
    for name, change in changes.items():
        yield Input("dataset.json", name, "check", change_listing(change))
    for name in ("two classes with one name", "labels 5", "training 5", "a missing class"):
        yield Input("dataset.json", name, "train", change_listing(changes[name]))

    def write_listing(content: bytes) -> Corrupt:
        return lambda root, _: _ignore((root / "set" / "dataset.json").write_bytes(content))

    for name, content in {
        "empty": b"",
        "truncated": b'{"labels": {"0": "back',
        "nested 100,000 deep": b"[" * 100_000,
        "labels nested 100,000 deep": b'{"labels": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        "a number of 10,000 digits": b'{"labels": ' + b"9" * 10_000 + b"}",
        "UTF-16": '{"labels": 1}'.encode("utf-16"),
        "zeros": bytes(1000),
    }.items():
        yield Input("dataset.json", name, "check", write_listing(content))


def _ignore(_: object) -> None:
    """Let a lambda return None."""


EVIL = "unet3d.cli.train.Path.touch"

EXPERIMENTS = {
    "syntax": "data: [1, 2",
    "a tab": "data:\n\tpatch_size: 1",
    "a list": "- 1\n- 2",
    "a string": "hello",
    "zeros": "\0\0\0",
    "an alias bomb": "x: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{c}: &{c} [{','.join([f'*{b}'] * 9)}]\n"
        for b, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "seed: *i\n",
    "a recursive alias": "data: &a\n  patch_size: *a",
    "nested 5,000 deep": "seed: " + "[" * 5000 + "]" * 5000,
    "a python object": "seed: !!python/object/apply:os.system ['touch OWNED']",
    "an unknown key": "dta: {patch_size: [8, 8, 8]}",
    "an unknown nested key": "data: {patch: [8, 8, 8]}",
    "an unknown option": "defaults: [{override /model: none_such}]",
    "a recursive defaults list": "defaults: [x]",
    "data is a number": "data: 5",
    "data is null": "data: null",
    "model is a list": "model: [1]",
    "model is empty": "model: null",
    "trainer is a string": "trainer: fast",
    "optimizer is a number": "optimizer: 3",
    "patch_size is a dict": "data: {patch_size: {a: 1}}",
    "patch_size is a string": "data: {patch_size: large}",
    "patch_size has fractions": "data: {patch_size: [8.5, 8, 8]}",
    "patch_size is huge": "data: {patch_size: [1000000, 1000000, 1000000]}",
    "patch_size is NaN": "data: {patch_size: [.nan, 8, 8]}",
    "batch_size is huge": "data: {batch_size: 1000000000000}",
    "batch_size is a fraction": "data: {batch_size: 1.5}",
    "batch_size is a string": "data: {batch_size: two}",
    "num_workers is a string": "data: {num_workers: many}",
    "root is true": "data: {root: true}",
    "root is a list": "data: {root: [a]}",
    "width is huge": "model: {channels: [100000000, 100000000]}",
    "width is a string": "model: {width: wide}",
    "lr is NaN": "optimizer: {lr: .nan}",
    "lr is a string": "optimizer: {lr: high}",
    "seed is a fraction": "seed: 1.5",
    "seed is a dict": "seed: {a: 1}",
    "precision is a list": "precision: [16]",
    "fold is true": "fold: true",
    "fold is a dict": "fold: {a: 1}",
    "max_steps is a fraction": "trainer: {max_steps: 1.5}",
    "an interpolation of a missing key": "seed: ${no.such.key}",
    "a recursive interpolation": "seed: ${seed}",
    "an unknown resolver": "seed: ${evil:1}",
    "memory is false": "memory: false",
    "inference is a string": "inference: {overlap: half}",
    "evaluation is a list": "evaluation: [1]",
    "allow_targets is a string": "allow_targets: torch",
    "model is os.system": "model: {_target_: os.system, command: touch OWNED}",
    "model is torch.hub.load": "model: {_target_: torch.hub.load}",
    "a method as a target": f"model: {{_target_: {EVIL}, self: OWNED}}",
    "a nested target": "model: {encoder: {_target_: subprocess.run, args: touch OWNED}}",
    "a target in an interpolated node": "seed: {_target_: os.mkdir, path: OWNED}\n"
    "pool: {tau: '${seed}'}",
    "a target that is a number": "loss: {_target_: 5}",
    "a target that is empty": "loss: {_target_: ''}",
    "a module as a target": "loss: {_target_: torch.nn}",
    "a Hydra callback": "hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir, self: OWNED}}}",
    "Hydra's logging": "hydra: {job_logging: {handlers: {x: {(): pathlib.Path, y: 1}}}}",
    "Hydra's environment": "hydra: {job: {env_set: {CXX: touch OWNED}}}",
    "Hydra's launcher": "hydra: {launcher: {_target_: os.system}}",
}


def _experiments() -> Iterator[Input]:
    for name, content in EXPERIMENTS.items():

        def corrupt(root: Path, _: Random, content=content) -> None:
            path = root / "conf" / "experiment" / "x.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(f"# @package _global_\n{content}\n")

        keys = frozenset(re.findall(r"\w+(?=:)", content))
        yield Input("experiment", name, "train", corrupt, ("experiment=x",), False, keys)


class RunsCode:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("OWNED",)


def _checkpoints() -> Iterator[Input]:
    path = "run.ckpt"

    def change_bytes(change: Callable[[bytes], bytes]) -> Corrupt:
        return lambda root, _: _ignore(
            (root / path).write_bytes(change((root / path).read_bytes()))
        )

    def change_content(change: Callable[[dict], Any]) -> Corrupt:
        def corrupt(root: Path, _: Random) -> None:
            checkpoint = torch.load(root / path, weights_only=True)
            changed = change(checkpoint)
            torch.save(checkpoint if changed is None else changed, root / path)

        return corrupt

    def set_value(*keys: str, value: Any) -> Callable[[dict], Any]:
        def change(checkpoint: dict) -> None:
            node = checkpoint
            for key in keys[:-1]:
                node = node[key]
            node[keys[-1]] = value

        return change

    def change_first_weight(change: Callable[[torch.Tensor], Any]) -> Callable[[dict], Any]:
        def apply(checkpoint: dict) -> None:
            weights = checkpoint["state_dict"]
            name = next(iter(weights))
            weights[name] = change(weights[name])

        return apply

    cut: dict[str, Corrupt] = {
        f"cut at {fraction:.0%}": change_bytes(lambda b, n=fraction: b[: int(len(b) * n)])
        for fraction in (0, 0.1, 0.5, 0.99)
    }
    changes: dict[str, Corrupt] = {
        **cut,
        "a text file": change_bytes(lambda b: b"hello"),
        "another zip file": lambda root, _: _write_zip(root / path),
        "a pickle that runs code": lambda root, _: _ignore(
            (root / path).write_bytes(pickle.dumps(RunsCode()))
        ),
        "nested code": change_content(lambda c: c.__setitem__("unet3d", RunsCode())),
        "a list": change_content(lambda c: [1]),
        "no metadata": change_content(lambda c: c.pop("unet3d") and None),
        "no weights": change_content(lambda c: c.pop("state_dict") and None),
        "empty metadata": change_content(set_value("unet3d", value={})),
        "weights NaN": change_content(change_first_weight(lambda w: w * float("nan"))),
        "a weight with another shape": change_content(change_first_weight(lambda w: w[:1])),
        "a weight that is a string": change_content(change_first_weight(lambda w: "x")),
        "a complex weight": change_content(change_first_weight(lambda w: w.to(torch.complex64))),
    }
    metadata = {
        ("config",): [None, 5, []],
        ("config", "model"): [
            *(None, 5, "x", [], {}),
            *({"_target_": name} for name in ("os.mkdir", "torch.load", EVIL, "torch.nn.ReLU")),
            {"_target_": "torch.nn.modules.module.torch.hub.load", "repo_or_dir": "x"},
        ],
        ("config", "model", "width"): [-1, "wide", 10**6, 3.5],
        ("config", "model", "depth"): [10**6],
        ("config", "model", "channels"): [[10**8, 10**8], [1] * 10**5],
        ("config", "pool"): [None, {"_target_": "os.mkdir", "path": "OWNED"}],
        ("config", "data"): [None, {}],
        ("config", "data", "num_classes"): [None, 0, 10**9],
        ("config", "data", "patch_size"): [None, "x", [8], [0, 8, 8], [8.5, 8, 8], [10**6] * 3],
        ("config", "data", "regions"): [5, {"a": [1]}],
        ("config", "precision"): [7],
        ("classes",): [5, [], ["a"], ["a", "b", "b"]],
        ("channels",): [5, [], ["a", "b"]],
        ("preprocessing",): [None, {}, {"num_classes": 3, "evil": 1}],
        ("preprocessing", "orientation"): [5, "XYZ"],
        ("preprocessing", "spacing_mm"): [[0, 1, 1], "x", [1e-9, 1e-9, 1e-9], [float("nan")] * 3],
        ("preprocessing", "normalize"): [["ct"], 5],
        ("preprocessing", "num_classes"): ["x"],
        ("keep_largest_component",): [5],
    }
    for keys, values in metadata.items():
        for value in values:
            name = f"{'.'.join(keys)} = {value!r}"[:60]
            changes[name] = change_content(set_value("unet3d", *keys, value=value))
    for name, corrupt in changes.items():
        yield Input("checkpoint", name, "predict", corrupt)
    for name in ("cut at 50%", "a pickle that runs code", "a list", "no weights", "weights NaN"):
        yield Input(
            "checkpoint",
            f"resume: {name}",
            "train",
            changes[name],
            (f"resume={path}", "trainer.max_steps=2"),
        )
        yield Input(
            "checkpoint", f"init_from: {name}", "train", changes[name], (f"init_from={path}",)
        )
    for number in range(12):
        resume = (f"resume={path}", "trainer.max_steps=2")
        command, overrides = ("train", resume) if number % 4 == 3 else ("predict", ())
        yield Input(
            "bit flip",
            f"in a checkpoint's tensor, {number}",
            command,
            _flip_tensor_bit(path),
            overrides,
        )


def _flip_tensor_bit(path: str) -> Corrupt:
    """Flip a bit in the data of a random tensor."""

    def corrupt(root: Path, rng: Random) -> None:
        content = bytearray((root / path).read_bytes())
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            records = [r for r in archive.infolist() if "/data/" in r.filename and r.file_size > 64]
        record = rng.choice(records)
        start = content.index(record.filename.encode(), record.header_offset)
        start += len(record.filename)
        extra = int.from_bytes(
            content[record.header_offset + 28 : record.header_offset + 30], "little"
        )
        offset = start + extra + rng.randrange(record.file_size)
        content[offset] ^= 1 << rng.randrange(8)
        (root / path).write_bytes(content)

    return corrupt


def _write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
