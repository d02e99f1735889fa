"""The trainer that nnU-Net finds in this folder, which `nnUNet_extTrainer` names."""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as module_of_trainer
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn
from torch.utils._pytree import tree_map

from unet3d.cuda_graphs import CudaGraphs, GraphedPass
from unet3d.errors import summarize_error
from unet3d.machine import get_free_bytes
from unet3d.memory.any_network import estimate_memory
from unet3d.nnunet.context_loader import ContextLoader, Contexts, find_spatial
from unet3d.nnunet.device_augmentation import DeviceAugmenter
from unet3d.nnunet.fused_network import use_fused_blocks

USABLE = 0.8
"""Fraction of the free memory that a step may take; contexts and their augmentation take some."""


class nnUNetTrainerLean(nnUNetTrainer):
    """nnU-Net's trainer with a network of fused blocks, which has the same weights.

    On one GPU, forward and backward are replayed as CUDA graphs. On every GPU, nnU-Net's
    transforms run there. 2D networks are trained as nnU-Net does.
    """

    checkpointing = os.environ.get("UNET3D_CHECKPOINTING", "auto")  # the first that fits a GPU
    augments_on_cpu = os.environ.get("UNET3D_AUGMENT") == "cpu"
    graphed_pass: GraphedPass | None = None
    augmenter: DeviceAugmenter | None = None
    network: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def build_network_architecture(
        cls,
        plans_manager,
        configuration_manager,
        num_input_channels,
        num_output_channels,
        enable_deep_supervision=True,
    ) -> nn.Module:
        """Build the network of the plans, or that of a trainer that is combined with this one."""
        network = super().build_network_architecture(
            plans_manager,
            configuration_manager,
            num_input_channels,
            num_output_channels,
            enable_deep_supervision,
        )
        if len(configuration_manager.patch_size) == 3:
            use_fused_blocks(network, cls.checkpointing.replace("auto", "lean"))
        return network

    @property
    def is_2d(self) -> bool:
        """Return whether the network is nnU-Net's own."""
        return len(self.configuration_manager.patch_size) == 2

    def _do_i_compile(self) -> bool:
        return super()._do_i_compile() if self.is_2d else False

    def initialize(self) -> None:
        super().initialize()
        if self.is_2d:
            return
        if not hasattr(getattr(self.network, "module", self.network), "checkpointing"):
            name = type(self.network).__name__
            self.print_to_log_file(
                f"{name} is trained without fused blocks: another trainer built it"
            )
            return
        if self.device.type != "cuda":
            vars(self.network)["checkpointing"] = self.checkpointing.replace("auto", "fused")
            return
        self.choose_checkpointing(get_free_bytes(self.device))
        if not self.is_ddp:
            self.replay_with(CudaGraphs(self.device))

    def choose_checkpointing(self, free_bytes: int) -> None:
        """Set the first strategy that is estimated to fit, and log what it needs."""
        network: Any = getattr(self.network, "module", self.network)  # of DDP
        patch: Any = self.configuration_manager.patch_size
        shape: Any = (self.batch_size, self.num_input_channels, *patch)
        heads = self.label_manager.num_segmentation_heads

        def compute_loss(outputs: Any) -> torch.Tensor:
            levels = outputs if isinstance(outputs, list) else [outputs]
            channels = heads if self.label_manager.has_regions else 1
            target = [y.new_zeros(len(y), channels, *y.shape[2:]) for y in levels]
            return self.loss(outputs, target if isinstance(outputs, list) else target[0])

        def estimate(name: str) -> int:
            network.checkpointing = name
            options: Any = {
                "loss": compute_loss,
                "optimizer": partial(torch.optim.SGD, momentum=0.99),
            }
            return estimate_memory(network, shape, precision="16", **options).reserved

        names = (
            ("fused", "lean", "leanest") if self.checkpointing == "auto" else (self.checkpointing,)
        )
        try:
            plain = estimate("none")
            needed = next(
                (n for name in names if (n := estimate(name)) <= USABLE * free_bytes), None
            )
        except Exception as error:  # a loss that reads its values
            network.checkpointing = names[-1] if len(names) == 1 else "lean"
            self.print_to_log_file(f"memory is not estimated: {summarize_error(error)}")
            return
        name, needed = network.checkpointing, needed or estimate(names[-1])
        self.print_to_log_file(
            f"checkpointing={name}: {needed / 2**20:,.0f} MiB reserved are estimated, "
            f"{plain / 2**20:,.0f} for plain modules"
        )

    def get_dataloaders(self) -> tuple[Any, Any]:
        """Let the loader of training deliver contexts, which the device augments."""
        if self.augments_on_cpu or self.device.type != "cuda":
            return super().get_dataloaders()
        return self.augment_on(self.device)

    def augment_on(self, device: torch.device) -> tuple[Any, Any]:
        """Return loaders of which that of training augments on a device, if this is possible."""
        made, make = list[Any](), self.get_training_transforms

        def keep(*args: Any, **kwargs: Any) -> Contexts:
            made.append(make(*args, **kwargs))
            return Contexts(find_spatial(made[0]))

        vars(self)["get_training_transforms"] = keep
        module: Any = module_of_trainer
        loader, module.nnUNetDataLoader = module.nnUNetDataLoader, ContextLoader
        try:
            training, validation = super().get_dataloaders()
        finally:
            module.nnUNetDataLoader = loader
            del vars(self)["get_training_transforms"]
        try:
            self.augmenter = DeviceAugmenter(training, made[0], device)
        except Exception as error:  # a transform of a cascade, or of another trainer
            self.print_to_log_file(f"augments on the CPU: {summarize_error(error)}")
            self.augmenter = None
            self.close_loaders(training, validation)
            return super().get_dataloaders()
        return self.augmenter, validation

    def close_loaders(self, *loaders: Any) -> None:
        """End the processes of loaders."""
        for loader in loaders:
            if hasattr(loader, "_finish"):
                loader._finish()

    def replay_with(self, recorder: CudaGraphs) -> GraphedPass:
        """Replay what this recorder records of forward and backward."""
        self.graphed_pass = GraphedPass(self.network, self.loss, recorder, trusted=False)
        return self.graphed_pass

    def train_step(self, batch: dict) -> dict:
        """Train on a batch, as nnU-Net's trainer does."""
        recorded = self.graphed_pass
        if recorded is None:
            self.prepare_batch()
            return super().train_step(batch)
        if recorded.model is not self.network or recorded.loss is not self.loss:  # by a subclass
            recorded = self.replay_with(recorded.recorder or CudaGraphs(self.device))

        def to_device(x: torch.Tensor) -> torch.Tensor:
            return x.to(self.device, non_blocking=True)

        scaler: Any = self.grad_scaler or torch.amp.GradScaler(enabled=False)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            loss, _ = recorded(to_device(batch["data"]), tree_map(to_device, batch["target"]))
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.network.parameters(), 12)
        scaler.step(self.optimizer)
        scaler.update()
        self.prepare_batch()  # while the GPU computes the step
        return {"loss": loss.detach().cpu().numpy()}

    def prepare_batch(self) -> None:
        """Begin to augment the next batch."""
        if self.augmenter is not None:
            self.augmenter.prepare()

    def validation_step(self, batch: dict) -> dict:
        """Validate in the memory of the graphs, which is unused between two steps."""
        recorded = self.graphed_pass
        with nullcontext() if recorded is None else recorded.use_memory():
            return super().validation_step(batch)

    def on_train_end(self) -> None:
        self.graphed_pass = None  # frees its memory for prediction
        if self.augmenter is not None:
            self.dataloader_train, self.augmenter = self.augmenter.loader, None
        super().on_train_end()

    def on_epoch_end(self) -> None:
        if self.device.type == "cuda":
            allocated, reserved = (
                read(self.device) / 2**20
                for read in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            )
            self.print_to_log_file(f"peak: {allocated:,.0f} MiB, {reserved:,.0f} reserved")
        super().on_epoch_end()
