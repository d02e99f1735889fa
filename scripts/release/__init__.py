"""Tools for releases: pinned packages of the container, and the package's description."""
