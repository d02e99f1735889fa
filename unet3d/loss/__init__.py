"""Losses: (logits, labels) -> scalar."""
