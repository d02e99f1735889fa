"""Configure and build a training step: network, loss and optimizer."""
