"""Samplers, datasets and loaders of training patches and validation volumes."""
