"""Print the folder for `nnUNet_extTrainer`, in which nnU-Net finds the trainer."""

from pathlib import Path

print(Path(__file__).parent / "trainer")
