"""What a run must not change to be resumed: all but RESUMABLE_CHANGES."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from unet3d.config.names import rename_saved_keys
from unet3d.text import flatten_keys, join_first

RESUMABLE_CHANGES = (
    # Limits: how long it trains.
    *("trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "max_skipped_steps"),
    "callbacks.early_stopping",
    # What is shown and recorded.
    *("logger", "metrics", "validation", "evaluation", "debug", "callbacks.case_images"),
    *("trainer.enable_progress_bar", "trainer.log_every_n_steps", "trainer.num_sanity_val_steps"),
    # What is saved, and where it starts.
    *("save_every_seconds", "callbacks.best_checkpoint.top_k", "resume", "init_from"),
    # Processes and memory; kind of device, number of processes and fused blocks are compared.
    *("data.num_workers", "memory", "checkpointing", "inference.batch_size", "allow_targets"),
    *("trainer.accelerator", "trainer.devices", "trainer.launch", "trainer.timeout_seconds"),
    "trainer.cuda_graph",
    # Where data is and how it is split: the cases are compared by their contents.
    *("data.root", "data.cache", "data.cache_format", "data.layout", "data.splits"),
    *("data.group_by", "data.annotated", "data.invalid_cases"),
)
"""Keys that a resumed run may change, with all keys below them; any other key is compared."""

MAX_NAMED = 12  # differences that are named in full


def list_compared(metadata: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must not change, by dotted key: a checkpoint's metadata, and what is `fixed`."""
    ignored = (*RESUMABLE_CHANGES, *fixed)
    config = flatten_keys(rename_saved_keys(metadata.get("config", {})), whole=("regions",))
    values = {key: value for key, value in config if not is_below(key, ignored)}
    values |= {key: metadata[key] for key in ("classes", "channels") if key in metadata}
    values |= flatten_keys(metadata.get("preprocessing", {}), "preprocessing.")
    values |= {  # the order of regions matters
        key: list(value.items()) for key, value in values.items() if isinstance(value, Mapping)
    }
    # As a JSON file would have them: tuples are lists, numbers Python's.
    return json.loads(json.dumps({**values, **fixed}, default=str))


def find_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs of what `list_compared` returns, as text with both values.

    Another class hides its other keys.
    """

    def show(value: Any) -> str:
        text = value if isinstance(value, str) and value else json.dumps(value)
        return text if len(text) <= 80 else f"{text[:77]}..."

    keys = [key for key in {**now, **saved} if key != "cases"]
    different = [key for key in keys if saved.get(key) != now.get(key)]
    groups = [key.removesuffix("._target_") for key in different if key.endswith("._target_")]
    shown = [key for key in different if key.endswith("._target_") or not is_below(key, groups)]
    lines = [
        f"{key} is {show(now.get(key))} now, but was {show(saved.get(key))}"
        for key in shown[:MAX_NAMED]
    ]
    if len(shown) > MAX_NAMED:
        lines.append(f"{len(shown) - MAX_NAMED} more keys differ")
    for part, cases in now["cases"].items():
        before = saved["cases"].get(part, {})
        changes = {
            "was added": [name for name in cases if name not in before],
            "is missing": [name for name in before if name not in cases],
            "has other contents": [
                name for name in cases if cases[name] != before.get(name, cases[name])
            ],
        }
        found = [f"{part} case {join_first(v, 3)} {verb}" for verb, v in changes.items() if v]
        if not found and list(before) != list(cases):
            found = [f"the {part} cases have another order"]
        lines += found
    return lines


def is_below(key: str, parents: Iterable[str]) -> bool:
    """Return whether a key is one of these, or below one.

    >>> is_below("data.layout.root", ("data.layout",)), is_below("data.layouts", ("data.layout",))
    (True, False)
    """
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)
