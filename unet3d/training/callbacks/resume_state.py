"""The position of a run, saved in every checkpoint, from which training resumes bit for bit.

Lightning's own counters depend on the hook in which a checkpoint was saved; resumed from them, a
run may skip an epoch's validation or train on a batch twice. So they are computed from the
position of the training loader after the last optimizer step. A checkpoint of another experiment is
refused: RESUMABLE_CHANGES says what may differ.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.config.names import rename_saved_keys
from unet3d.errors import UsageError
from unet3d.text import flatten_keys, join_first, pluralize
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.lightning_internals import (
    build_fit_loop_state,
    get_logger_step,
    is_optimizer_step,
    is_validation_epoch,
)

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
    *("data.root", "data.cache", "data.layout", "data.splits", "data.group_by"),
    *("data.annotated", "data.invalid_cases"),
)
"""Keys that a resumed run may change, with all keys below them; any other key is compared."""

MAX_NAMED = 12  # differences that are named in full


class ResumeState(Callback):
    """Save and restore the position of the training loader, and what follows from it.

    Random numbers within a step, such as dropout's, depend on (seed, epoch, batch, rank) alone. A
    resumed run must have the same `fixed` values, or it would be another experiment.
    """

    def __init__(self, data: VolumeDataModule, limits: StoppingLimits, fixed: Mapping[str, Any]):
        self.data, self.limits, self.fixed = data, limits, fixed
        self.position = {"epoch": 0, "batch": 0}  # of the loader, after the last optimizer step
        self.logged = 0  # steps that loggers have recorded
        self.pending = False  # whether a validation is due before the next batch
        self.ending = False  # whether that is the run's last validation, at a limit
        self.loaded_batch: int | None = None  # of its epoch, at which a resumed run begins

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batch, self.loaded_batch = self.loaded_batch, None
        if batch == 0:
            trainer.fit_loop.restarting = False  # the epoch starts from its first batch
        elif batch is not None and self.pending and self.ending:
            trainer.check_val_every_n_epoch = 1
            trainer.val_check_batch = batch  # may be before the epoch's last

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batches = trainer.current_epoch * len(self.data.train_loader) + batch_idx
        number = batches * trainer.world_size + trainer.global_rank
        seed = hash((self.data.settings.seed, number))
        # torch.manual_seed takes 1 ms: without a GPU it records the stack for a lazy CUDA call.
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if is_optimizer_step(trainer):
            self.position = self.data.train_loader.state_dict()
            self.logged = get_logger_step(trainer) + 1
            self.ending = trainer.should_stop
            epoch_ends = self.data.train_loader.batch == len(self.data.train_loader) or self.ending
            self.pending = epoch_ends and is_validation_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.pending = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "logged": self.logged,
            "pending": self.pending,
            "ending": self.ending,
            "fixed_settings": self.fixed_settings(),
        }

    def fixed_settings(self) -> dict[str, Any]:
        """Return what a resumed run must share besides its config."""
        order = self.data.train_loader.epoch_sampler
        return {
            "seed": self.data.settings.seed,
            "number of processes": order.world_size,
            "data.batch_size": order.batch_size,
            "patches per epoch": order.samples,
            **self.fixed,
            "cases": self.data.digest_cases(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state, steps = checkpoint["callbacks"][self.state_key], checkpoint["global_step"]
        self.position, self.logged = state["position"], state["logged"]
        self.ending = state["ending"]
        epoch, batch = self.position["epoch"], self.position["batch"]
        # If the limit has been raised, its last validation is no longer due.
        self.pending = state["pending"] and (not self.ending or self.limits.is_reached(steps))
        if batch == len(self.data.train_loader) and not self.pending:
            epoch, batch = epoch + 1, 0
        self.loaded_batch = batch
        counters = trainer.fit_loop.state_dict()
        counters.update(
            build_fit_loop_state(
                epoch=epoch,
                batch=batch,
                batches_per_epoch=len(self.data.train_loader),
                optimizer_steps=steps,
                logger_step=self.logged - self.pending,
                validation_pending=self.pending,
            )
        )
        checkpoint["loops"] = {"fit_loop": counters}
        # Lightning would restore its own within an epoch, but not between two.
        self.data.train_loader.load_state_dict(self.position)


def get_logged_steps(
    position: ResumeState, checkpoint: dict[str, Any], path: Any, now: Mapping[str, Any]
) -> int:
    """Return how many steps a checkpoint's run has logged; refuse one that cannot be resumed.

    `now` is the metadata that this run saves in its checkpoints.
    """
    state = checkpoint.get("callbacks", {}).get(position.state_key)
    if state is None:
        raise UsageError(f"resume={path}: it holds weights alone: start a new run with init_from=")
    saved = list_compared(checkpoint["unet3d"], state["fixed_settings"])
    different = find_differences(saved, list_compared(now, position.fixed_settings()))
    if different:
        raise UsageError(
            f"resume={path}: the settings differ from those of the run that saved the checkpoint: "
            f"{'; '.join(different)}: set back what changed, or use init_from= to start a new run "
            "from its weights"
        )
    return state["logged"]


def list_training_cases(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return digests of the cases on which a network was trained, also before its `init_from`."""
    state = checkpoint.get("callbacks", {}).get("ResumeState", {}).get("fixed_settings", {})
    before = checkpoint.get("unet3d", {}).get("pretrained_on", [])
    return sorted({*before, *state.get("cases", {}).get("training", {}).values()})


def find_leak(data: VolumeDataModule, trained_on: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the validation cases on which the network of `init_from` was trained, and a line."""
    cases, known = data.digest_cases()["validation"], set(trained_on)
    seen = [name for name, digest in cases.items() if digest in known]
    warning = (
        f"the network of init_from= was trained on {len(seen)} of "
        f"{pluralize(len(cases), 'validation case')} ({join_first(seen)}), which inflates the "
        "scores: start from a network of the same fold"
    )
    return seen, warning if seen else None


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
    """Return what differs, as text with both values; another class hides its other keys."""

    def show(value: Any) -> str:
        text = value if isinstance(value, str) and value else json.dumps(value)
        return text if len(text) <= 80 else f"{text[:77]}..."

    keys = [*now, *(key for key in saved if key not in now)]
    different = [key for key in keys if key != "cases" and saved.get(key) != now.get(key)]
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
