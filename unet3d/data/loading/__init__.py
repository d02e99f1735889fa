"""Load training patches and validation volumes in batches."""
