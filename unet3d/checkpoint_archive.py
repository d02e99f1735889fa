"""Read what a checkpoint file holds without building any of it, and refuse all but plain values.

torch's restricted unpickler runs no code, but it builds tensors whose storage is smaller than they
are, allocates what a file declares, and reads storages at offsets that nobody compares with the
file. So the structure is read first, by an unpickler that records what would
be built without building it.
"""

import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

MAX_STRUCTURE_BYTES = 2**24
"""Size of the pickle, which has no weights in it: some 800 bytes for each trained tensor."""

MAX_VALUES = 1_000_000
MAX_DEPTH = 50
"""Limits of the values, counting what is shared wherever it is used."""

MAX_OPERATIONS = 3 * MAX_VALUES
"""Operations of the pickle: two or three make a value."""

STORAGES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage"), 8),
}
"""Bytes of a value by torch's class of storage."""

OPERATIONS = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.BINPERSID),
    *(pickle.REDUCE, pickle.BUILD, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""Operations of the pickles that torch.save writes; others can allocate what they declare."""


class NotPlainError(ValueError):
    """A checkpoint holds something else than plain values and dense tensors."""


class Storage(NamedTuple):
    """The bytes of tensors, in an entry of the archive."""

    key: str
    kind: str
    values: int


class TensorSpec(NamedTuple):
    """A tensor that would be built."""

    storage: Storage
    size: tuple[int, ...]


class ObjectSpec(NamedTuple):
    """Another object that would be built: a storage's class, a device, a number of numpy."""

    name: str


PLAIN_OBJECTS = (ObjectSpec("device"), ObjectSpec("number"))
"""What may be a value by itself."""


class Names(dict[Any, Any]):
    """An OrderedDict, whose attributes torch sets: `_metadata` of a state dict, no method."""

    attributes: Mapping[str, Any] = {}


def find_corruption(path: Path) -> str | None:
    """Return why an archive is not as torch.save writes it, by its checksums; None if intact.

    Its entries are stored, each in its own bytes, and it has one directory: what torch reads or
    maps into memory is what was verified.
    """
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                odd = _find_odd_entry(archive, file) or _find_odd_end(file)
                wrong = odd or archive.testzip()
        except Exception as error:  # a flipped bit in a header can raise anything
            return f"incomplete or not a checkpoint ({error})"
    return odd or (f"wrong checksum in {wrong}" if wrong else None)


def _find_odd_entry(archive: zipfile.ZipFile, file: IO[bytes]) -> str | None:
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    # torch ignores case when it looks for an entry.
    if len({entry.filename.casefold() for entry in entries}) < len(entries):
        return "two entries have the same name"
    if len({entry.filename.partition("/")[0] for entry in entries}) != 1:
        return "its entries are not in one folder"
    end = 0
    for entry in entries:
        # Python decodes other names, which torch compares byte by byte.
        if not entry.filename.isascii() or entry.filename != entry.orig_filename:
            return f"the name {entry.filename!r} is not in ASCII"
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            return f"{entry.filename} is compressed, which torch.save never does"
        if entry.header_offset < end or (end == 0 and entry.header_offset):
            return f"{entry.filename} overlaps another entry"
        file.seek(entry.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", file.read(30))
        end = entry.header_offset + 30 + name_length + extra_length + entry.file_size
    return "its entries overlap its directory" if end > archive.start_dir else None


def _find_odd_end(file: IO[bytes]) -> str | None:
    """Compare the two ends of an archive, of which readers choose differently."""
    file.seek(-98, os.SEEK_END)
    start = file.tell()
    record, locator, end = (file.read(size) for size in (56, 20, 22))
    if end[:4] != b"PK\x05\x06":
        return "something follows its directory"
    if locator[:4] != b"PK\x06\x07":
        return None
    count, size, offset = struct.unpack("<32xQQQ", record)
    plain = struct.unpack("<10xHII", end[:20])
    limits = (2**16 - 1, 2**32 - 1, 2**32 - 1)
    same = all(
        b in (a, top) for a, b, top in zip((count, size, offset), plain, limits, strict=True)
    )
    return (
        None if same and struct.unpack("<8xQ4x", locator) == (start,) else "it has two directories"
    )


def check_structure(path: Path) -> None:
    """Raise a NotPlainError unless a file without damage holds plain values and dense tensors."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        structure, folder = f"{root}/data.pkl", f"{root}/data/"
        if sizes.get(structure, 0) > MAX_STRUCTURE_BYTES:
            raise NotPlainError(f"its structure takes more than {MAX_STRUCTURE_BYTES:,} bytes")
        reader = _StructureReader(
            archive.read(structure),
            {n.removeprefix(folder): s for n, s in sizes.items() if n.startswith(folder)},
        )
    try:
        content = reader.load()
    except (NotPlainError, EOFError):
        raise
    except RecursionError:
        raise NotPlainError("its values are nested too deeply") from None
    except Exception as error:  # of an operation that is not known, or on the wrong values
        raise NotPlainError(f"its structure cannot be read ({type(error).__name__})") from error
    check_values(content)


def _count(operate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return an operation of a pickle that is refused if there were too many before."""

    def operate_counted(reader: "_StructureReader") -> None:
        reader.operations += 1
        if reader.operations > MAX_OPERATIONS:
            raise NotPlainError(f"its structure has more than {MAX_OPERATIONS:,} operations")
        operate(reader)

    return operate_counted


class _StructureReader(pickle._Unpickler):  # of the standard library, in Python
    """Read a pickle, and record what it would build without building it."""

    dispatch: ClassVar[dict[int, Any]] = {
        op[0]: _count(pickle._Unpickler.dispatch[op[0]]) for op in OPERATIONS
    }

    def __init__(self, data: bytes, sizes: Mapping[str, int]):
        super().__init__(io.BytesIO(data))
        self.stack: list[Any] = []
        self.metastack: list[Any] = []
        self.operations = 0
        self.sizes = sizes
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what records an object instead of building it."""
        full_name = f"{module}.{name}"
        if module == "torch" and name in STORAGES:
            return ObjectSpec(name)
        if full_name not in BUILDERS:
            raise NotPlainError(f"it holds a {full_name}")
        return BUILDERS[full_name]

    def persistent_load(self, pid: Any) -> Storage:
        """Return a storage that the archive has, in the size that is declared."""
        match pid:
            case ("storage", ObjectSpec(kind), str(key), str(), int(values)) if (
                kind in STORAGES and key.isascii() and key.isdigit()
            ):
                storage = Storage(key, kind, values)
            case _:
                raise NotPlainError("a storage is not described as torch.save does")
        if self.sizes.get(key) != values * STORAGES[kind]:
            raise NotPlainError(f"the storage {key} is not in the file with the size it declares")
        if self.storages.setdefault(key, storage) != storage:
            raise NotPlainError(f"the storage {key} is described twice")
        return storage

    def load_reduce(self) -> None:
        """Record a call."""
        arguments, function = self.stack.pop(), self.stack[-1]
        if not isinstance(arguments, tuple) or function not in BUILDERS.values():
            raise NotPlainError("it calls something")
        self.stack[-1] = function(*arguments)

    def load_build(self) -> None:
        """Record the attributes of an object."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Names) and isinstance(state, dict):
            target.attributes = {**target.attributes, **state}
        elif target != ObjectSpec("dtype") or state != (3, "<", None, None, None, -1, -1, 0):
            raise NotPlainError("it changes an object")

    def load_stop(self) -> None:
        """End with the only object that is left."""
        if len(self.stack) != 1 or self.metastack:
            raise NotPlainError("its structure holds more than one object")
        stop: Any = pickle._Unpickler.dispatch[pickle.STOP[0]]
        stop(self)

    dispatch[pickle.REDUCE[0]] = _count(load_reduce)
    dispatch[pickle.BUILD[0]] = _count(load_build)
    dispatch[pickle.STOP[0]] = load_stop


def _record_tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
) -> TensorSpec:
    """Record a tensor that lies in its storage, each value in its own place."""
    if not isinstance(storage, Storage) or requires_grad not in (True, False) or hooks != {}:
        raise NotPlainError("a tensor is not described as torch.save does")
    if not (_are_counts(size) and _are_counts(stride) and _are_counts((offset,))):
        raise NotPlainError(f"a tensor has the size {size} and the strides {stride}")
    if len(size) != len(stride) or len(size) > 16:
        raise NotPlainError(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    span = 1
    for step, count in sorted(zip(stride, size, strict=True)):
        if count > 1:
            if step < span:
                raise NotPlainError(f"a tensor of size {size} overlaps itself: strides {stride}")
            span += step * (count - 1)
    if prod(size) and offset + span > storage.values:
        raise NotPlainError(f"a tensor of size {size} is larger than its storage")
    return TensorSpec(storage, size)


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(n) is int and 0 <= n < 2**48 for n in values)


def _record_parameter(data: Any, requires_grad: Any, hooks: Any) -> TensorSpec:
    if not isinstance(data, TensorSpec) or requires_grad not in (True, False) or hooks != {}:
        raise NotPlainError("a parameter is not described as torch.save does")
    return data


def _record_names() -> Names:
    return Names()


def _record_counter(counts: Any) -> dict[Any, Any]:
    if not isinstance(counts, dict):
        raise NotPlainError("a counter is not a mapping")
    return dict(counts)


def _record_size(values: Any) -> tuple[int, ...]:
    if not _are_counts(values):
        raise NotPlainError("a size is not a tuple of ints")
    return values


def _record_device(kind: Any, index: Any = 0) -> ObjectSpec:
    if not isinstance(kind, str) or not re.fullmatch("[a-z]{1,16}", kind) or type(index) is not int:
        raise NotPlainError("a device is not a name")
    return ObjectSpec("device")


def _record_dtype(name: Any, *flags: Any) -> ObjectSpec:
    if name not in ("f4", "f8") or flags != (False, True):
        raise NotPlainError("it holds numbers of numpy other than float32 and float64")
    return ObjectSpec("dtype")


def _record_bytes(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise NotPlainError("bytes are not text")
    return text.encode("latin1")


def _record_number(dtype: Any, value: Any) -> ObjectSpec:
    if dtype != ObjectSpec("dtype") or not isinstance(value, bytes) or len(value) not in (4, 8):
        raise NotPlainError("a number of numpy is not described as numpy does")
    return ObjectSpec("number")


BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _record_tensor,
    "torch._utils._rebuild_parameter": _record_parameter,
    "torch.Size": _record_size,
    "torch.device": _record_device,
    "collections.OrderedDict": _record_names,
    "collections.Counter": _record_counter,
    "numpy.dtype": _record_dtype,
    "numpy._core.multiarray.scalar": _record_number,
    "numpy.core.multiarray.scalar": _record_number,
    "_codecs.encode": _record_bytes,
}
"""All that a checkpoint may build: torch's tensors and devices, nnU-Net's scores, plain values."""


def check_values(content: Any) -> None:
    """Raise a NotPlainError unless values are plain, and no more or deeper than a run saves."""
    stack, count = [(content, 0)], 0
    while stack:
        value, depth = stack.pop()
        count += 1
        if count > MAX_VALUES:
            raise NotPlainError(f"it holds more than {MAX_VALUES:,} values")
        if depth > MAX_DEPTH:
            raise NotPlainError(f"its values are nested more than {MAX_DEPTH} deep")
        if isinstance(value, TensorSpec) or value in PLAIN_OBJECTS:
            continue
        if isinstance(value, dict):
            odd = [key for key in value if type(key) not in (str, int)]
            if odd:
                raise NotPlainError(f"a key is not a name but a {type(odd[0]).__name__}")
            stack += [(part, depth + 1) for part in value.values()]
            if isinstance(value, Names):
                _check_attributes(value)
                stack.append((value.attributes, depth + 1))
        elif type(value) in (list, tuple):
            stack += [(part, depth + 1) for part in value]
        elif not isinstance(value, str | int | float | None):
            raise NotPlainError(f"it holds a {type(value).__name__}")


def _check_attributes(names: Names) -> None:
    """Raise a NotPlainError unless attributes are the versions of modules.

    Others would replace methods, or have torch take tensors of the file instead of copying them.
    """
    versions = names.attributes.get("_metadata", {})
    plain = names.attributes.keys() <= {"_metadata"} and isinstance(versions, dict)
    for version in versions.values() if plain else ():
        plain = plain and isinstance(version, dict) and version.keys() <= {"version"}
        plain = plain and all(type(number) is int for number in version.values())
    if not plain:
        raise NotPlainError("a mapping has attributes other than the versions of modules")
