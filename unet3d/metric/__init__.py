"""Score segmentations: validation metrics during training, and all scores of single cases."""
