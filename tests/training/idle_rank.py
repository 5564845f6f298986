"""A rank for test_launch that trains nothing: says that it is there, and waits, or ends with the code it is given."""

import os
import sys
import threading
from pathlib import Path

from infra.compute.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    if len(sys.argv) > 2:
        sys.exit(int(sys.argv[2]))
    partial = Path(sys.argv[1]) / f"{os.environ['RANK']}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(partial.with_suffix(".ready"))
    threading.Event().wait(120)
