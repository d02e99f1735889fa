"""The trainer that nnU-Net finds in this folder, which `nnUNet_extTrainer` names."""

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from unet3d.nnunet.fused_network import use_fused_blocks


class nnUNetTrainerLean(nnUNetTrainer):
    """nnU-Net's trainer with a network of fused blocks, which has the same weights."""

    checkpointing = "lean"

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
