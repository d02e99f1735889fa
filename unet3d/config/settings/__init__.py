"""Frozen settings of each command, parsed once from its composed config."""
