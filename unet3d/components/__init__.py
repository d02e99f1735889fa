"""Build what several workflows need: the dataset, the network, the optimizer."""
