"""Read datasets from disk and turn them into training samples."""
