"""What a sandboxed program may use.

Invariant: every resource that a program could hoard has a bound, and the bounds hold for the whole tree of its
processes: what the kernel limits per process (memory, processor time, open files) is multiplied by `processes` at
most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

MB = 2**20
BASE_MEMORY_MB = 64
"""Address space that an interpreter needs before it runs anything."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one run. Raises ValueError for one that is not positive."""

    seconds: float = 10.0
    """Wall clock from start to end; past it the whole tree is killed."""
    cpu_seconds: int = 5
    """Processor time of one process. A busy machine makes programs slow by the wall clock, but not by this one."""
    memory_mb: int = 256
    """Memory, twice: address space of one process (more is refused to it), and what all of them hold together in
    memory (more ends the run as `out_of_memory`)."""
    processes: int = 16
    """Processes and threads at once, the program's own included."""
    open_files: int = 64
    """File descriptors of one process."""
    file_mb: int = 8
    """Size of one file."""
    disk_mb: int = 16
    """Size of the working directory, the only place that can be written to. It is held in memory."""
    disk_files: int = 2048
    """Files in the working directory; more end the run as `out_of_disk`."""
    output_kb: int = 64
    """Standard output, and as much standard error; more end the run as `out_of_output`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} ({getattr(self, field.name)}) must be positive")
        if self.memory_mb < BASE_MEMORY_MB:
            raise ValueError(f"memory_mb ({self.memory_mb}) must be at least {BASE_MEMORY_MB}: no interpreter starts")

    def prlimit(self) -> list[str]:
        """The arguments of prlimit(1) that set what the kernel bounds."""
        bounds = {
            "as": self.memory_mb * MB,
            "core": 0,
            "cpu": self.cpu_seconds,
            "fsize": self.file_mb * MB,
            "memlock": 0,
            "msgqueue": 0,
            "nofile": self.open_files,
            "nproc": self.processes,
        }
        return [f"--{name}={value}" for name, value in bounds.items()]
