"""A filter of system calls, as the classic BPF program that `bwrap --seccomp` reads.

Namespaces and limits do the isolating; the filter closes what they leave open:
- memory that no limit counts (memfd, System V and POSIX message queues and shared memory);
- looking into other processes, also those of the same sandbox (the grader must keep its secret from the code);
- kernel interfaces that no ordinary program needs and that keep turning up in privilege escalations.

A refused call fails with EPERM. Calls of a foreign architecture end the process.
"""

from __future__ import annotations

import errno
import platform
import struct

from infra.sandbox.errors import SandboxUnavailable

REFUSED = {  # name: (x86_64, aarch64)
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "vmsplice": (278, 75),
    "fanotify_init": (300, 262),
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of REFUSED, and the kernel's AUDIT_ARCH number."""
X32 = 0x40000000
"""On x86_64, numbers from here on are a second table of the same calls."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


def program(machine: str | None = None) -> bytes:
    """The filter for this machine. Raises SandboxUnavailable for a processor it has no numbers for."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxUnavailable(
            f"sandbox: no filter of system calls for the processor {machine!r}; use one of {', '.join(ARCHITECTURES)}"
        )
    column, architecture = ARCHITECTURES[machine]
    numbers = [row[column] for row in REFUSED.values()]
    tests = [(_EQUAL, number) for number in numbers]
    if machine == "x86_64":
        tests.insert(0, (_AT_LEAST, X32))
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for index, (test, number) in enumerate(tests):
        code.append((test, len(tests) - index, 0, number))  # to the last instruction
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
