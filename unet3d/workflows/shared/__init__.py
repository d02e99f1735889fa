"""Build what several workflows need: the dataset and the network."""
