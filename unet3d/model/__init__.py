"""Networks: (B, C, D, H, W) -> logits (B, K, D, H, W)."""
