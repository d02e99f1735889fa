"""Scripts for developers, run as modules: `python -m scripts.x.y`."""
