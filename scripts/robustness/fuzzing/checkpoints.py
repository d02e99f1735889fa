"""Checkpoints with one part that no run saves, from the archive's bytes to its values."""

import io
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from scripts.robustness.fuzzing.isolation import Input
from scripts.robustness.fuzzing.mutations import NUMBERS, VALUES, change_value, corrupt

FILE = "run.ckpt"

GLOBALS = (
    *("os system", "builtins eval", "torch load", "torch.hub load", "torch._utils _rebuild_tensor"),
    *("torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_qtensor", "torch Tensor"),
    *("torch._tensor _rebuild_from_type_v2", "torch.storage UntypedStorage", "numpy ndarray"),
    *("collections OrderedDict", "torch FloatStorage", "torch ComplexFloatStorage", "torch Size"),
    *("numpy.core.multiarray scalar", "numpy.core.multiarray _reconstruct", "torch.nn ReLU"),
)

SIZES = st.one_of(st.integers(0, 9), st.sampled_from(NUMBERS))


class Rebuilt:
    """A tensor that is described freely."""

    def __init__(self, storage: Any, offset: int, size: tuple, stride: tuple):
        self.arguments = storage, offset, size, stride, False, OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Acts:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("OWNED",)


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn),
)


@st.composite
def draw_tensor(draw: st.DrawFn, like: torch.Tensor | None = None) -> Any:
    """Return a tensor of the size that is expected with odd values, or an odd one."""
    shape = list(torch.zeros(3).shape if like is None else like.shape)
    if draw(st.booleans()):
        shape = draw(st.lists(st.integers(0, 5), max_size=5))
    value = draw(st.sampled_from((0.0, 1.0, -1.0, 1e30, -1e30, float("nan"), float("inf"))))
    kind = draw(st.sampled_from(("full", "full", "rebuilt", "expanded", "sparse", "meta", "one")))
    if kind == "rebuilt":
        storage = torch.full((8,), value)._typed_storage()
        size, stride = (tuple(draw(st.lists(SIZES, max_size=4))) for _ in range(2))
        return Rebuilt(storage, draw(SIZES), size, stride)
    dtype = draw(st.sampled_from(DTYPES))
    if kind == "one":  # a single odd value
        tensor = (torch.zeros(3) if like is None else like).clone()
        if tensor.numel() and tensor.is_floating_point():
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
        return tensor
    tensor = torch.zeros(shape) if dtype is torch.bool else torch.full(shape, value)
    if kind == "expanded":
        return torch.full((), value).expand(shape)
    if kind == "sparse":
        return tensor.to_sparse()
    if kind == "meta":
        return torch.empty(shape, device="meta")
    return tensor.nan_to_num(0, 0, 0).to(dtype) if not dtype.is_floating_point else tensor.to(dtype)


ODD_VALUES: st.SearchStrategy[Any] = st.one_of(
    VALUES,
    draw_tensor(),
    st.sampled_from((b"x", {1}, (1, 2), 1j, range(3), torch.float32, torch.device("cpu"))),
    st.builds(Acts),
    st.integers(2, 300).map(lambda depth: reduce(lambda value, _: [value], range(depth), 0)),
)


@st.composite
def change_content(draw: st.DrawFn, content: dict[Any, Any]) -> bytes:
    """Save the content with another value."""
    key = draw(st.sampled_from(sorted(content, key=str)))
    changed = dict(content)
    if draw(st.booleans()):  # the same kind of value: those get furthest
        changed[key] = draw(change_like(content[key]))
    else:
        changed[key] = draw(change_value(content[key], ODD_VALUES))
    if draw(st.integers(0, 9)) == 0:
        changed[key] = draw(add_attributes(changed[key]))
    stream = io.BytesIO()
    try:
        torch.save(changed, stream)
    except (RuntimeError, TypeError, pickle.PicklingError, RecursionError, UnicodeError):
        torch.save({**content, key: draw(VALUES.filter(_can_be_saved))}, stream)
    return stream.getvalue()


@st.composite
def add_attributes(draw: st.DrawFn, value: Any) -> Any:
    """Turn a mapping into one with attributes, which torch restores."""
    if not isinstance(value, dict):
        return value
    names: OrderedDict[Any, Any] = OrderedDict(value)
    version = draw(st.one_of(VALUES, st.just({"assign_to_params_buffers": True})))
    metadata = {key.rpartition(".")[0]: version for key in value if isinstance(key, str)}
    name = draw(st.sampled_from(("_metadata", "_metadata", "get", "keys", "x")))
    names.__dict__[name] = metadata if draw(st.booleans()) else draw(VALUES)
    return names


def _can_be_saved(value: Any) -> bool:
    return "\\ud" not in repr(value)


@st.composite
def change_like(draw: st.DrawFn, value: Any) -> Any:
    """Replace a value at any depth by another of its kind."""
    if isinstance(value, dict | list) and value:
        copy = value.copy()
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        copy[key] = draw(change_like(value[key]))
        return copy
    if isinstance(value, torch.Tensor):
        return draw(draw_tensor(value))
    if isinstance(value, bool) or value is None:
        return draw(st.sampled_from((True, False, None, 1)))
    if isinstance(value, int | float):
        return draw(st.one_of(st.sampled_from(NUMBERS), st.floats(), st.integers(-9, 99)))
    if isinstance(value, str):
        return draw(st.one_of(st.text(max_size=9), st.sampled_from((f"{value}x", "", "none"))))
    return draw(VALUES)


@st.composite
def change_members(draw: st.DrawFn, archive: bytes) -> bytes:
    """Write the archive again with other members, and correct checksums."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        members = [(entry.filename, source.read(entry)) for entry in source.infolist()]
    stored = zipfile.ZIP_STORED
    for _ in range(draw(st.integers(1, 2))):
        where = draw(st.integers(0, len(members) - 1))
        name, data = members[where]
        match draw(st.integers(0, 6)):
            case 0:
                del members[where]
            case 1:
                members.append((draw(st.sampled_from((name, name.upper(), f"{name}/x"))), data))
            case 2:
                folder = draw(st.sampled_from(("../x", "/x", "x", "", "run/data/99", "run")))
                members[where] = folder, data
            case 3:
                members[where] = name, draw(corrupt(data))
            case 4:
                stored = zipfile.ZIP_DEFLATED
            case 5:
                members[where] = name, data * draw(st.integers(0, 3))
            case 6:
                members = draw(st.permutations(members))
        if not members:
            break
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", stored) as target:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = stored
            target.writestr(info, data)
    return stream.getvalue()


@st.composite
def change_pickle(draw: st.DrawFn, archive: bytes) -> bytes:
    """Write the archive again with other operations in its pickle, and correct checksums."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        members = {entry.filename: source.read(entry) for entry in source.infolist()}
    name = next(name for name in members if name.endswith("/data.pkl"))
    data = members[name]
    starts = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    operations = [data[a:b] for a, b in pairwise(starts)]
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(0, len(operations) - 1))
        match draw(st.integers(0, 5)):
            case 0:
                del operations[where]
            case 1:
                operations.insert(where, operations[draw(st.integers(0, len(operations) - 1))])
            case 2:
                other = draw(st.integers(0, len(operations) - 1))
                operations[where], operations[other] = operations[other], operations[where]
            case 3:
                code = draw(st.sampled_from(pickletools.opcodes)).code.encode("latin-1")
                operations.insert(where, code + draw(st.binary(max_size=9)))
            case 4:
                numbers = [n for n, op in enumerate(operations) if op[:1] == pickle.GLOBAL]
                module, function = draw(st.sampled_from(GLOBALS)).split()
                operations[draw(st.sampled_from(numbers))] = f"c{module}\n{function}\n".encode()
            case 5:
                operations[where] = draw(corrupt(operations[where], 1))
        if not operations:
            break
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        for member, content in members.items():
            target.writestr(member, b"".join(operations) if member == name else content)
    return stream.getvalue()


def draw_checkpoints(folder: Path, train: tuple[str, ...]) -> st.SearchStrategy[Input]:
    """Return a strategy for commands that read a changed checkpoint of a folder."""
    archive = (folder / FILE).read_bytes()
    content = torch.load(folder / FILE, weights_only=True)
    predict = ("predict", f"checkpoint={FILE}", "input=scans", "output=out/labels", "device=cpu")
    resume = (*train, f"resume={FILE}", "trainer.max_steps=2")
    words = st.sampled_from(
        (
            *(predict,) * 4,
            *(resume,) * 5,
            *((*train, f"init_from={FILE}"),) * 2,
            *(("load", FILE),) * 5,
            ("export", f"checkpoint={FILE}", "output=out/x.pt2", "format=torch_export"),
        )
    )
    data = st.one_of(
        corrupt(archive),
        change_members(archive),
        change_pickle(archive),
        change_content(content),
        change_content(content),
        change_content(content),
    )
    return st.builds(
        lambda words, data: Input(kind="checkpoint", words=words, files={FILE: data}), words, data
    )
