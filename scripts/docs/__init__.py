"""Build the documents: generated pages, measured tables, screenshots."""
