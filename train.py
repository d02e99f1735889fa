"""`python train.py model=unet_small pool=median precision=16`: the same as `unet3d train`."""

import sys

from unet3d.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    sys.exit(main())
