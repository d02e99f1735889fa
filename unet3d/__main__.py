"""`python -m unet3d COMMAND`: the same as `unet3d COMMAND`."""

import sys

from unet3d.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
