"""Train a network; start reading at build.py."""
