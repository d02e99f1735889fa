"""The GPU report: every benchmark and test that needs a GPU."""
