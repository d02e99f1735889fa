"""Metrics: of a training's volumes, by update and compute; of one case's arrays, by scores."""
