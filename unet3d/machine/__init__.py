"""Hardware, software and limits of this machine."""
