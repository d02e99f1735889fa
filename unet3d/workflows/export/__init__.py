"""Export a trained network and verify the file."""
