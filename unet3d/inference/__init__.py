"""Sliding-window inference within a memory budget."""
