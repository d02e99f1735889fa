"""Score predictions against references."""
