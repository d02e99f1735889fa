"""The trainer that nnU-Net finds in this folder, which `nnUNet_extTrainer` names."""

from contextlib import nullcontext
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn
from torch.utils._pytree import tree_map

from unet3d.cuda_graphs import CudaGraphs, GraphedPass
from unet3d.nnunet.fused_network import use_fused_blocks


class nnUNetTrainerLean(nnUNetTrainer):
    """nnU-Net's trainer with a network of fused blocks, which has the same weights.

    On one GPU, forward and backward are replayed as CUDA graphs.
    """

    checkpointing = "lean"
    graphed_pass: GraphedPass | None = None
    network: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer

    @staticmethod
    def build_network_architecture(
        plans_manager,
        configuration_manager,
        num_input_channels,
        num_output_channels,
        enable_deep_supervision=True,
    ) -> nn.Module:
        """Build the network of the plans."""
        network = nnUNetTrainer.build_network_architecture(
            plans_manager,
            configuration_manager,
            num_input_channels,
            num_output_channels,
            enable_deep_supervision,
        )
        use_fused_blocks(network, nnUNetTrainerLean.checkpointing)
        return network

    def _do_i_compile(self) -> bool:
        return False

    def initialize(self) -> None:
        super().initialize()
        if self.device.type == "cuda" and not self.is_ddp:
            self.replay_with(CudaGraphs(self.device))

    def replay_with(self, recorder: CudaGraphs) -> None:
        """Replay what this recorder records of forward and backward."""
        self.graphed_pass = GraphedPass(self.network, self.loss, recorder, trusted=False)

    def train_step(self, batch: dict) -> dict:
        """Train on a batch, as nnU-Net's trainer does."""
        if self.graphed_pass is None:
            return super().train_step(batch)

        def to_device(x: torch.Tensor) -> torch.Tensor:
            return x.to(self.device, non_blocking=True)

        scaler: Any = self.grad_scaler or torch.amp.GradScaler(enabled=False)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            loss, _ = self.graphed_pass(
                to_device(batch["data"]), tree_map(to_device, batch["target"])
            )
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.network.parameters(), 12)
        scaler.step(self.optimizer)
        scaler.update()
        return {"loss": loss.detach().cpu().numpy()}

    def validation_step(self, batch: dict) -> dict:
        """Validate in the memory of the graphs, which is unused between two steps."""
        recorded = self.graphed_pass
        with nullcontext() if recorded is None else recorded.use_memory():
            return super().validation_step(batch)

    def on_train_end(self) -> None:
        self.graphed_pass = None  # frees its memory for prediction
        super().on_train_end()
