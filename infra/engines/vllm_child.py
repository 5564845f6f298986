"""`python -m infra.engines.vllm_child ARGV...`: one vLLM server as a child that can not outlive its starter.

Invariant: it lives in the process group of this process, which kills the group when its own parent is gone, and ends
when the server does, with its exit code. Nothing of the environment that is meant for our own clients reaches it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from infra.compute.lifeline import die_with_parent
from infra.services.service import environment


def main(argv: list[str]) -> int:
    die_with_parent()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    child = subprocess.Popen(argv, env=environment(OMP_NUM_THREADS=threads), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
