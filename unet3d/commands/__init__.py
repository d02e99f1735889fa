"""The verbs of `unet3d VERB [overrides]`, one file each."""
