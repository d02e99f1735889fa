"""Count the operations of a training step, and model how long they take on a GPU."""
