"""Read what W&B and MLflow were given, from their files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7

Points = list[tuple[int, str, Any]]


def read_wandb(folder: Path) -> tuple[set[str], Points]:
    """Return the ids of all offline runs in a folder, and their (step, name, value)."""
    from wandb.proto import wandb_internal_pb2

    ids, points = set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in iter_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") != "history":
                continue
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = values.pop("trainer/global_step")
            points += [(step, n, v) for n, v in values.items() if not n.startswith("_")]
    return ids, points


def iter_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file: blocks of parts with a checksum, a length and a kind."""
    position, record = FILE_HEADER, b""
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER
        record += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def read_mlflow(folder: Path) -> tuple[set[str], Points]:
    """Return the ids of all runs in a folder's database, and their (step, name, value)."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("unet3d")
    assert experiment is not None
    ids, points = set(), []
    for run in client.search_runs([experiment.experiment_id]):
        ids.add(run.info.run_id)
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            points += [(m.step, name, m.value) for m in history]
    return ids, points
