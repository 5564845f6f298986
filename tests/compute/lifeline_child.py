"""A child for test_lifeline: says that it is ready and waits; `deaf` ignores SIGTERM."""

import signal
import sys
import threading

from infra.compute.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    threading.Event().wait(60)
