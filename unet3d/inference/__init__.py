"""Run sliding-window inference within a memory budget."""
