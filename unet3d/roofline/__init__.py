"""List what a training step launches on a GPU, without running it."""
