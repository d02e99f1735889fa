"""Check a dataset for files that cannot be used."""
