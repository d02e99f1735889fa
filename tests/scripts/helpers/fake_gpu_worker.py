"""A worker of the GPU report whose rows crash, raise a CUDA error or hang."""

import json
import os
import sys
import time
from pathlib import Path

ROWS = ["first", "crashes", "raises", "hangs", "last"]


def main():
    job = json.load(sys.stdin)

    def record(**event):
        with Path(job["events"]).open("a") as file:
            file.write(json.dumps(event) + "\n")

    record(names=ROWS)
    for name in ROWS:
        if name in job["skip"]:
            continue
        record(started=name)
        if name == "crashes":
            os.abort()
        if name == "raises":
            record(name=name, error="CUDA error")
            sys.exit(75)
        if name == "hangs":
            time.sleep(60)
        record(name=name, value={"good": True, "pid": os.getpid()}, seconds=0.0)


if __name__ == "__main__":
    main()
