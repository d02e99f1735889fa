"""Train a network; start reading at commands/train.py."""
