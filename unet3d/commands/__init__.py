"""The commands: each file has what one of them reads, does and prints."""
