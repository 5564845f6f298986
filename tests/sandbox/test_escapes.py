"""Attempts to break out, or to outlive the deadline: none works. They run inside the full sandbox only, as a user
without rights; the fixture fails where it can not be had, and nothing here ever falls back."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest

from infra.sandbox.grading import Exam, grade
from infra.sandbox.limits import Limits
from infra.sandbox.sandbox import Result, Sandbox
from tests.sandbox.conftest import LIMITS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def survivors(token: str) -> list[int]:
    """Processes of the host whose command line has the token: forks of a program keep its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def attempt(sandbox: Sandbox) -> Callable[..., Result]:
    """Runs a program and checks what must be true of any: it is over in time, and nothing of it is left."""

    def run(program: str, stdin: bytes = b"") -> Result:
        assert sandbox.isolation == "full"
        token = secrets.token_hex(8)
        result = sandbox.run([sandbox.python, "-I", "-S", "main.py", token], {"main.py": program}, stdin)
        assert not survivors(token)
        assert result.seconds < LIMITS.seconds + 5
        assert max(len(result.stdout), len(result.stderr)) <= LIMITS.output_kb * 1024
        return result

    return run


def test_an_honest_program_works(attempt: Callable[..., Result]) -> None:
    """Without this the rest could pass in a sandbox that runs nothing."""
    result = attempt(
        "import sys, json, ctypes, tempfile, threading, subprocess\n"
        "print(json.dumps(sys.stdin.read()), file=open('note', 'w'))\n"
        "t = threading.Thread(target=lambda: print(open('note').read().strip())); t.start(); t.join()\n"
        "print(tempfile.mkdtemp()[:5], subprocess.check_output([sys.executable, '-c', 'print(7)']))\n"
        "print('oops', file=sys.stderr); sys.exit(3)",
        b"hello",
    )
    assert (result.exit_code, result.stderr, result.broken) == (3, b"oops\n", None)
    assert result.stdout == b"\"hello\"\n/tmp/ b'7\\n'\n"


# --- hoarding -----------------------------------------------------------------------------------------------


def test_fork_bomb(attempt: Callable[..., Result]) -> None:
    result = attempt("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    assert result.timed_out or result.out_of_memory or result.exit_code == 128 + signal.SIGKILL


def test_processes_and_threads_are_counted(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import threading, time\n"
        "n = 0\n"
        "try:\n"
        "    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: print(n, flush=True)\n"
        "import os; os._exit(0)"
    )
    assert 0 < int(result.stdout) < LIMITS.processes


def test_memory_bomb(attempt: Callable[..., Result]) -> None:
    result = attempt("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.exit_code != 0 and (result.out_of_memory or b"MemoryError" in result.stderr)


def test_memory_bomb_of_many_processes(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0: break\n"
        "x = bytearray(b'x') * (50 << 20)\n"
        "time.sleep(60)"
    )
    assert result.out_of_memory


def test_memory_that_no_limit_counts(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os, ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "try: os.memfd_create('x')\n"
        "except PermissionError: print('refused')\n"
        "for call, *rest in (('shmget', 0, 4096, 0o1600), ('msgget', 0, 0o1600), ('semget', 0, 1, 0o1600)):\n"
        "    print(getattr(libc, call)(*rest), ctypes.get_errno() == errno.EPERM)\n"
        "try: open('/dev/shm/x', 'w')\n"
        "except OSError as e: print(e.errno == errno.EROFS)\n"
    )
    assert result.stdout.split() == b"refused -1 True -1 True -1 True True".split()


def test_disk_bomb(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import itertools, os\n"
        "written = 0\n"
        "try:\n"
        "    for i in itertools.count():\n"
        "        with open(str(i), 'wb', buffering=0) as f:\n"
        "            for _ in range(16): written += f.write(bytes(1 << 16))\n"
        "except OSError as e: print(os.strerror(e.errno), written)"
    )
    assert result.stdout.startswith(b"No space left") and int(result.stdout.split()[-1]) <= LIMITS.disk_mb << 20


def test_one_big_file(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os\nf = open('x', 'wb')\ntry: os.ftruncate(f.fileno(), 3 << 20)\nexcept OSError as e: print(e.strerror)"
    )
    assert result.stdout == b"File too large\n"


def test_many_empty_files(attempt: Callable[..., Result]) -> None:
    result = attempt("import itertools\nfor i in itertools.count(): open(str(i), 'w').close()")
    assert result.out_of_disk


def test_many_open_files(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os\nn = 0\ntry:\n    while True: os.pipe(); n += 2\nexcept OSError as e: print(e.strerror, n)"
    )
    assert result.stdout.startswith(b"Too many open files") and int(result.stdout.split()[-1]) < LIMITS.open_files


@pytest.mark.parametrize("fd", [1, 2])
def test_endless_output(attempt: Callable[..., Result], fd: int) -> None:
    result = attempt(f"import os\nwhile True: os.write({fd}, b'x' * 4096)")
    assert result.out_of_output and len([result.stdout, result.stderr][fd - 1]) == LIMITS.output_kb * 1024


def test_burning_the_processor_and_handling_the_signal_for_it(sandbox: Sandbox) -> None:
    patient = Sandbox(Limits(seconds=100, cpu_seconds=1))
    program = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    result = patient.run([patient.python, "-I", "-S", "-c", program])
    assert (result.exit_code, result.broken) == (128 + signal.SIGKILL, None)


# --- outliving ----------------------------------------------------------------------------------------------


def test_ignoring_every_signal(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import signal, time\n"
        "for s in signal.valid_signals():\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)"
    )
    assert result.timed_out


def test_stopping_itself(attempt: Callable[..., Result]) -> None:
    assert attempt("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)").timed_out


def test_closing_its_output_and_going_on(attempt: Callable[..., Result]) -> None:
    assert attempt("import os, time\nfor fd in (0, 1, 2): os.close(fd)\ntime.sleep(60)").timed_out


def test_leaving_a_daemon(attempt: Callable[..., Result]) -> None:
    """A session of its own, parentless, without the pipes: it ends with the program, which is not late."""
    result = attempt(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for fd in (0, 1, 2): os.close(fd)\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait(); print('left')"
    )
    assert (result.exit_code, result.stdout, result.broken) == (0, b"left\n", None)


def test_a_daemon_that_keeps_the_pipes_does_not_hold_up_the_result(attempt: Callable[..., Result]) -> None:
    result = attempt("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)\nos._exit(0)")
    assert (result.exit_code, result.broken) == (0, None)


def test_signals_reach_nobody_else(attempt: Callable[..., Result]) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        result = attempt(
            "import os, signal\n"
            f"for pid in (1, os.getppid(), {bystander.pid}, {os.getpid()}):\n"
            "    try: os.kill(pid, signal.SIGKILL)\n"
            "    except OSError as e: print(e.strerror)\n"
            "print(os.getpid() < 10, flush=True)\n"
            "os.kill(-1, signal.SIGKILL); os.kill(0, signal.SIGKILL)"
        )
        assert result.stdout == b"No such process\nNo such process\nTrue\n"
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


@pytest.mark.parametrize("name", ["bwrap", "python", "timeout"])
def test_it_ends_at_its_deadline_without_a_driver(sandbox: Sandbox, name: str) -> None:
    """The driver is killed as soon as there is such a process: while the sandbox is set up, or when it runs."""
    token = secrets.token_hex(8)
    program = (
        "import sys; from infra.sandbox.limits import Limits; from infra.sandbox.sandbox import Sandbox\n"
        "s = Sandbox(Limits(seconds=2))\n"
        "s.run([s.python, '-I', '-S', '-c', 'import time; time.sleep(100)', sys.argv[1][::-1]])"
    )

    def started() -> bool:
        with suppress(OSError):
            return any(Path(f"/proc/{pid}/comm").read_text().startswith(name) for pid in survivors(token))
        return False

    driver = subprocess.Popen([sys.executable, "-c", program, token[::-1]], cwd=ROOT)
    try:
        deadline = monotonic() + 60
        while not (seen := started()) and driver.poll() is None and monotonic() < deadline:
            sleep(0.001)
    finally:
        driver.kill()
        driver.wait()
    assert seen
    deadline = monotonic() + 60
    while (left := survivors(token)) and monotonic() < deadline:
        sleep(0.02)
    assert not left


async def test_cancelling_at_any_moment_leaves_nothing(sandbox: Sandbox) -> None:
    token = secrets.token_hex(8)
    argv = [sandbox.python, "-I", "-S", "-c", "import time; time.sleep(100)", token]
    for ticks in range(16):
        running = asyncio.create_task(sandbox.arun(argv))
        for _ in range(ticks * 3):
            await asyncio.sleep(0.002)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    await sandbox.arun([sandbox.python, "-c", "pass"])
    deadline = monotonic() + 30
    while (left := survivors(token)) and monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not left


# --- looking around -----------------------------------------------------------------------------------------


def test_reading_the_hosts_files(attempt: Callable[..., Result], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    names = [
        "/etc",
        "/etc/passwd",
        "/root",
        "/home",
        "/var",
        "/sys",
        "/proc",
        "/boot",
        "/opt",
        "/run",
        "/mnt",
        "/bin/sh",
    ]
    result = attempt(
        "import os, glob\n"
        f"print([p for p in {[*names, str(secret), str(ROOT)]} if os.path.lexists(p)])\n"
        "print(sorted(os.listdir('/')), os.listdir('/tmp'), glob.glob('/usr/lib/python3*/*-packages/*'))"
    )
    there, root = result.stdout.decode().splitlines()
    assert there == "[]"
    assert root.endswith(" ['main.py'] []")
    assert set(eval(root.split("]")[0] + "]")) <= {"dev", "lib", "lib64", "tmp", "usr"}


def test_symlinks_and_dots_lead_nowhere(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os\n"
        "os.symlink('/etc/passwd', 'a'); os.symlink('../../../etc/shadow', 'b'); os.symlink('/proc/self/root', 'c')\n"
        "here = os.open('/', os.O_RDONLY)\n"
        "for name in 'a', 'b', 'c/etc', '/../../etc/passwd':\n"
        "    try: open(name)\n"
        "    except OSError as e: print(e.strerror)\n"
        "try: os.open('../../etc/passwd', os.O_RDONLY, dir_fd=here)\n"
        "except OSError as e: print(e.strerror)"
    )
    assert result.stdout == b"No such file or directory\n" * 5


def test_the_hosts_environment_and_descriptors(attempt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with open("/etc/hostname") as held:
        os.set_inheritable(held.fileno(), True)
        result = attempt(
            "import os\n"
            "print('AWS_SECRET_ACCESS_KEY' in os.environ, len(os.environ) < 10)\n"
            "for fd in range(3, 1024):\n"
            "    try: print(os.fstat(fd))\n"
            "    except OSError: pass"
        )
    assert result.stdout == b"False True\n"


def test_network(attempt: Callable[..., Result]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0sandbox-{secrets.token_hex(4)}"
        abstract.bind(name)
        abstract.listen()
        result = attempt(
            "import socket\n"
            f"for address in (('127.0.0.1', {server.getsockname()[1]}), ('192.0.2.1', 53)):\n"
            "    try: socket.create_connection(address, timeout=1); print('connected')\n"
            "    except OSError: print('refused')\n"
            f"s = socket.socket(socket.AF_UNIX)\n"
            f"try: s.connect({name!r}); print('connected')\n"
            "except OSError: print('refused')\n"
            "try: socket.getaddrinfo('example.com', 80); print('resolved')\n"
            "except OSError: print('refused')\n"
            "print(len(socket.if_nameindex()))"
        )
    assert result.stdout.split() == [b"refused"] * 4 + [b"1"]


def test_devices_and_terminal(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os\n"
        "print([d for d in ('kmsg', 'mem', 'sda', 'vda', 'kvm', 'fuse', 'net') if os.path.exists('/dev/' + d)])\n"
        "for what in lambda: open('/dev/tty'), lambda: os.mknod('node', 0o60666, os.makedev(254, 0)):\n"
        "    try: what(); print('done')\n"
        "    except OSError: print('refused')"
    )
    assert result.stdout == b"[]\nrefused\nrefused\n"


# --- rights -------------------------------------------------------------------------------------------------


def test_writing_to_the_root(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import os, sys\n"
        "places = ['/x', '/usr/x', '/dev/x', '/usr/lib/x', os.path.dirname(os.__file__) + '/x', sys.executable]\n"
        "for place in places:\n"
        "    try: open(place, 'ab'); print('written', place)\n"
        "    except OSError as e: pass\n"
        "try: os.chmod(sys.executable, 0o777); print('changed')\n"
        "except OSError: pass"
    )
    assert (result.exit_code, result.stdout) == (0, b"")


def test_becoming_root(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import ctypes, os\n"
        "print(os.getuid() == 0, os.geteuid() == 0, os.getgroups())\n"
        "for call in (os.setuid, 0), (os.setgid, 0), (os.setgroups, [0]), (os.chroot, '/tmp'):\n"
        "    try: call[0](call[1]); print('done')\n"
        "    except OSError: pass\n"
        "libc = ctypes.CDLL(None)\n"
        "flags = [0x10000000, 0x00020000, 0x20000000, 0x40000000]\n"  # user, mount, pid, net
        "print([libc.unshare(f) for f in flags], libc.mount(b'proc', b'/tmp', b'proc', 0, None))\n"
        "stack = ctypes.create_string_buffer(1 << 16)\n"
        "main = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)\n"
        "top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16))\n"
        "print(libc.clone(main, top, 0x10000000 | 17, None))"
    )
    assert result.stdout.decode().splitlines() == ["False False []", "[-1, -1, -1, -1] -1", "-1"]


def test_looking_into_other_processes(attempt: Callable[..., Result]) -> None:
    result = attempt(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for pid in (1, os.getppid()): print(libc.ptrace(16, pid, None, None), ctypes.get_errno())\n"
        "print(libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0), ctypes.get_errno())"
    )
    assert result.stdout == b"-1 1\n-1 1\n-1 1\n"


# --- cheating at the tests ----------------------------------------------------------------------------------

EXAM = Exam("f", ["assert candidate(2) == 4", "assert candidate(3) == 9"])
LIE = 'print(\'{"secret": "\' + s + \'", "failure": null}\', flush=True)'
CHEATS = [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "def f(x):\n    import os; os._exit(0)",
    "def f(x):\n    raise SystemExit(0)",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    "class Int(int):\n    def __eq__(self, other): return True\ndef f(x): return Int(7)",
    "import builtins, json\njson.dumps = lambda *_: '{}'\nbuiltins.AssertionError = ValueError\ndef f(x): return 7",
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"value\": 5}\\n' * 9)\n    except OSError: pass",
    "def f(x):\n    while True: pass",
    "def f(x): return [x] * 10**9",
    "def f(x): return 'x' * 2**21",
    "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
    f"import gc\nfor s in [o for o in gc.get_objects() if isinstance(o, str)] + ['']:\n    {LIE}\ndef f(x): return 7",
    f"s = open('grader.py').read()[:32]\n{LIE}\ndef f(x): return 7",
]


@pytest.mark.parametrize("code", CHEATS)
def test_code_that_does_not_solve_it_does_not_pass(sandbox: Sandbox, code: str) -> None:
    failures = grade(sandbox, code, EXAM).failures
    assert len(failures) == 2 and None not in failures


@pytest.mark.parametrize(("preamble", "passed"), [("", 0), ("HINT = 'kangaroo'", 1)])
def test_the_code_does_not_hold_the_tests(sandbox: Sandbox, preamble: str, passed: int) -> None:
    """It answers with the expected value if that can be found in its memory, as it can in the second case."""
    code = (
        "import gc, sys\n"
        "def f(x):\n"
        "    texts, frame = [], sys._getframe(1)\n"
        "    while frame: texts.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "    for o in gc.get_objects():\n"
        "        if type(o) is dict: texts += [v for v in list(o.values()) if type(v) is str]\n"
        "    return 'kan' + 'garoo' if any('ooragnak' in text[::-1] for text in texts) else 'nothing'"
    )
    assert grade(sandbox, code, Exam("f", ["assert candidate(1) == 'kangaroo'"], preamble)).passed == passed
