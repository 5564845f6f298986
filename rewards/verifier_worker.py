"""The child of `rewards.verifier`: reads `[right, given]` lines, writes verdict lines, until its input ends."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
from contextlib import suppress
from time import process_time


def main(cpu_s: int, memory_mb: int) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for a verdict
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    logging.disable(logging.WARNING)  # it warns that nothing limits it: the kernel does
    from math_verify import parse, verify

    for line in sys.stdin:
        right, given = json.loads(line)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(process_time()) + cpu_s, hard))
        try:
            gold, target = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (right, given))
            verdict = "equal" if verify(gold, target, timeout_seconds=None) else "different"
        except (MemoryError, RecursionError, OverflowError):
            verdict = "too_costly"
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
