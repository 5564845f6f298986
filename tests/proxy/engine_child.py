"""`engine_child.py MODEL KEY`: a host with an embedded engine; prints its port, ends with its stdin."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from infra.engines.hf import HFEngine
from infra.engines.host import make_host
from infra.proxy.listen import Server, bind, listen


async def main(model: Path, key: str) -> None:
    async def fetch(tenant: str, version: int, directory: str) -> Path:
        return Path(directory)

    listener = bind("127.0.0.1", 0)
    listen(listener)
    server = Server(make_host(HFEngine(model, device="cpu", max_batch=4), key, fetch))
    print(listener.getsockname()[1], flush=True)
    await server.serve(sockets=[listener])


def end_with_stdin() -> None:
    sys.stdin.read()
    import os

    os._exit(0)


threading.Thread(target=end_with_stdin, daemon=True).start()
asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
