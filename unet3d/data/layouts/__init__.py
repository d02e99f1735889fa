"""Find cases on disk: one module per dataset layout."""
