"""Read W&B's own files: what a killed run has logged is what its file says.

W&B writes in a process of its own, which ends with ours and loses what it has not written yet. The
format was read in wandb 0.31: LevelDB's log, of records in protocol buffers.
"""

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES = 32768, 7
WHOLE, LAST = 1, 4
"""Kinds of parts that end a record."""


def read_history(folder: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in the files of all processes of a run; `*` is any run."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob(f"wandb/*run-*/run-{run_id}.wandb")):
        for data in iter_records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }


def iter_records(content: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file; the last one may be cut off."""
    position, record = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER_BYTES
        record += content[position : position + length]
        position += length
        if position > len(content):
            return
        if kind in (WHOLE, LAST):
            yield record
            record = b""
