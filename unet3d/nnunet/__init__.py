"""The bridge to nnU-Net: its networks and its trainer on fused blocks."""
