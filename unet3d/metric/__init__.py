"""Metrics: update(logits, labels), compute()."""
