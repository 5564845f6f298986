"""What the processes of one trainer tell each other: bytes from rank 0, sums and maxima of figures.

Invariant: nothing is pickled; every rank calls the same functions in the same order. A rank that waits for
longer than the process group's timeout gets torch's own error; `main` sets that timeout above every deadline of
rank 0, and a wait of rank 0 that may be longer than one of them is told now and then (`loop.Feed.pause`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast(payload: bytes | None, device: torch.device | str = "cpu") -> bytes:
    """Rank 0's payload, on every rank; the others pass None."""
    if world() == 1:
        assert payload is not None
        return payload
    size = torch.tensor([len(payload or b"")], dtype=torch.long, device=device)
    dist.broadcast(size, src=0)
    if rank() == 0:
        body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8).to(device)
    else:
        body = torch.empty(max(1, int(size)), dtype=torch.uint8, device=device)
    dist.broadcast(body, src=0)
    return body.cpu().numpy().tobytes()[: int(size)]


def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place."""
    if world() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """Maximum over ranks, in place."""
    if world() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor
