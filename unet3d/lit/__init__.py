"""Everything that uses Lightning."""
