"""What a sandbox takes from the host: helper programs, an unprivileged user, a Python and the files that it needs.

Invariant: `Interpreter.paths` are all that a sandbox sees of the host: one executable, its standard library, and the
directories of the system's shared libraries. Packages of the host are not among them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from infra.sandbox.errors import SandboxUnavailable

UID = 64999
"""User and group that a root's sandboxes run as. Nobody else should use it."""
SYSTEM = "/usr/bin/python3"
SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user/max_user_namespaces": ("0", "15000"),
}
"""Settings under /proc/sys, of kernels and distributions: the value that forbids namespaces, and one that allows."""
_ASK = """
import json, os, sys, sysconfig
open(sys.executable).close()  # it may have been started with more rights than it has now
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/libpython" in line}  # if it is a shared library
asked = sysconfig.get_path("stdlib"), sorted(mapped), sysconfig.get_config_var("MULTIARCH") or ""
print(json.dumps([os.path.realpath(sys.executable), *asked]))
"""


@dataclass(frozen=True)
class Interpreter:
    executable: str
    paths: tuple[str, ...]
    """Existing paths of the host, none inside another."""
    hidden: tuple[str, ...]
    """Directories inside them that stay empty: packages of the host."""


def program(name: str) -> str:
    """The path of a helper program. Raises SandboxUnavailable."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        raise SandboxUnavailable(
            f"sandbox: the program {name!r} is missing; install it (`apt-get install bubblewrap util-linux`), "
            f"or ask for the lesser isolation 'rlimits' by name"
        )
    return os.path.realpath(found)


def unprivileged() -> tuple[str, ...]:
    """The command prefix that becomes an unprivileged user; empty for one who is none."""
    if os.geteuid() != 0:
        return ()
    return (program("setpriv"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=-all")


def allow_namespaces(settings: Path = Path("/proc/sys")) -> str:
    """What to do where the unprivileged can not make namespaces: the settings that forbid it, if it is those."""
    found = [
        f"`sysctl -w {name.replace('/', '.')}={allows}`"
        for name, (forbids, allows) in SWITCHES.items()
        if (settings / name).is_file() and (settings / name).read_text().strip() == forbids
    ]
    return " and ".join(found) or "allow unprivileged user namespaces on this machine (or in this container)"


def close_streams(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def find_interpreter(as_user: tuple[str, ...]) -> Interpreter:
    """The Python this process runs on if the sandboxed user may read it, else the system's.

    `as_user` is the command prefix that becomes that user. Raises SandboxUnavailable.
    """
    own = os.path.realpath(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    for candidate in (own, SYSTEM):
        try:
            asked = subprocess.run(
                [*as_user, candidate, "-I", "-S", "-c", _ASK],
                capture_output=True,
                text=True,
                timeout=20,
                env={},
                cwd="/",
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if asked.returncode == 0:
            executable, library, shared, multiarch = json.loads(asked.stdout)
            hidden = tuple(str(path) for path in Path(library).glob("*-packages"))
            return Interpreter(executable, _paths(executable, library, shared, multiarch), hidden)
    raise SandboxUnavailable(
        f"sandbox: neither {own} nor {SYSTEM} can be run by an unprivileged user; install the system's python3"
    )


def _paths(executable: str, library: str, shared: list[str], multiarch: str) -> tuple[str, ...]:
    system = [f"/{at}/{multiarch}" for at in ("usr/lib", "lib") if multiarch] + ["/usr/lib64", "/lib64"]
    wanted = [path for path in (executable, library, *shared, *system) if os.path.exists(path)]
    return tuple(p for p in dict.fromkeys(wanted) if not any(p.startswith(f"{other}/") for other in wanted))
