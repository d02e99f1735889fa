"""Read and write NIfTI files."""
