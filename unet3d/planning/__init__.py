"""Plan a training run for a dataset and a memory budget."""
