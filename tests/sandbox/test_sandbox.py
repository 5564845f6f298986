"""What a sandbox is asked for and answers: files, limits, cancelling, concurrency, and how it is unavailable."""

from __future__ import annotations

import asyncio
import os
import shutil
from itertools import count
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.sandbox import sandbox as module
from infra.sandbox import seccomp, supervision
from infra.sandbox.errors import SandboxFailure, SandboxUnavailable
from infra.sandbox.grader import decode, encode
from infra.sandbox.grading import Exam, agrade, grade
from infra.sandbox.host import allow_namespaces
from infra.sandbox.limits import Limits
from infra.sandbox.sandbox import Sandbox
from tests.sandbox.conftest import LIMITS

EXAM = Exam(
    "double",
    ["assert candidate(2) == 4", "assert candidate('ab') == 'abab'", "assert candidate(base) == 14"],
    "base = 7",
)


def test_files_are_laid_by_relative_path(sandbox: Sandbox) -> None:
    files: dict[str, str | bytes] = {"a/b/c.txt": "text", "d.bin": bytes(range(256)), "empty": b""}
    program = "import sys\nfor p in sys.argv[1:]: print(len(open(p, 'rb').read()))"
    result = sandbox.run([sandbox.python, "-c", program, *files], files)
    assert result.stdout.split() == [b"4", b"256", b"0"]
    for name in ("/etc/x", "../x", "a/../../x", ""):
        with pytest.raises(ValueError, match="must be a relative path"):
            sandbox.run(["true"], {name: b""})


def test_large_input_and_output_do_not_block_each_other(sandbox: Sandbox) -> None:
    program = "import sys\nfor line in sys.stdin: pass\nprint('x' * 10000); print('y' * 10000, file=sys.stderr)"
    result = sandbox.run([sandbox.python, "-c", program], stdin=b"line\n" * 10**6)
    assert (len(result.stdout), len(result.stderr), result.exit_code) == (10001, 10001, 0)
    assert sandbox.run([sandbox.python, "-c", "pass"], stdin=b"x" * 10**6).exit_code == 0


def test_exit_codes_and_signals(sandbox: Sandbox) -> None:
    assert sandbox.run([sandbox.python, "-c", "raise SystemExit(7)"]).exit_code == 7
    assert sandbox.run([sandbox.python, "-c", "import os; os.abort()"]).exit_code == 128 + 6
    assert sandbox.run(["/no/such/program"]).exit_code == 127


def test_runs_do_not_see_each_other(sandbox: Sandbox) -> None:
    program = "import os; print(os.listdir('.'), os.listdir('/tmp')); open('left', 'w'); open('/tmp/behind', 'w')"
    assert [sandbox.run([sandbox.python, "-c", program]).stdout for _ in range(2)] == [b"[] []\n"] * 2


async def test_cancelling_ends_the_program(sandbox: Sandbox) -> None:
    start = monotonic()
    slow = Sandbox(Limits(seconds=60))
    running = asyncio.create_task(slow.arun([slow.python, "-c", "import time; time.sleep(50)"]))
    while not running.done() and monotonic() < start + 0.3:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    result = await slow.arun([slow.python, "-c", "print(1)"])  # the place is free again
    assert result.stdout == b"1\n" and monotonic() < start + 40


@pytest.mark.slow
async def test_no_more_run_at_once_than_there_are_cores(sandbox: Sandbox) -> None:
    program = "import time\na = time.monotonic()\nwhile time.process_time() < 0.1: pass\nprint(a, time.monotonic())"
    results = await asyncio.gather(*(sandbox.arun([sandbox.python, "-S", "-c", program]) for _ in range(8)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    at_once = max(sum(start <= begin < end for start, end in spans) for begin, _ in spans)
    assert at_once <= len(os.sched_getaffinity(0))


def test_descriptors_do_not_leak(sandbox: Sandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sandbox.run([sandbox.python, "-S", "-c", "pass"], {"a": b"x"})
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # other threads come and go


# --- grading ------------------------------------------------------------------------------------------------


async def test_grading(sandbox: Sandbox) -> None:
    right = await agrade(sandbox, "def double(x): return x + x", EXAM)
    assert (right.failures, right.passed, right.isolation, right.unusable) == ((None,) * 3, 3, "full", None)
    wrong = grade(sandbox, "def double(x):\n    print('noise')\n    return x * x", EXAM)
    assert wrong.failures == (None, "TypeError: can't multiply sequence by non-int of type 'str'", "got 49")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def double(x) return x", "SyntaxError: expected ':'"),
        ("def triple(x): return x", "NameError: the code does not define double"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_code_that_can_not_be_loaded_says_why(sandbox: Sandbox, code: str, reason: str) -> None:
    verdict = grade(sandbox, code, EXAM)
    assert verdict.unusable is not None and verdict.unusable.startswith(reason)
    assert verdict.failures == (verdict.unusable,) * 3


@pytest.mark.slow
@pytest.mark.parametrize("pauses", [0.0, 0.02])
def test_what_was_passed_before_a_limit_is_kept(
    sandbox: Sandbox, pauses: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the supervisor comes a little late each time."""
    ticks = count()
    monkeypatch.setattr(supervision, "monotonic", lambda: monotonic() + next(ticks) * pauses)
    verdict = grade(sandbox, "import time\ndef double(x):\n    if x == 7: time.sleep(60)\n    return x + x", EXAM)
    assert verdict.failures == (None, None, "the limit on time was broken")


@pytest.mark.parametrize("pauses", [[60.0], [0.2] * 600])
@pytest.mark.parametrize("end", ["time.sleep(60)", "all(True for _ in iter(int, 1))"])
def test_a_program_whose_machine_stood_still_is_given_no_verdict(
    sandbox: Sandbox, end: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock the supervisor comes late, once or often, when the first test has passed."""
    left, late, running = iter(pauses), 0.0, False
    read = supervision._read

    def reading(fd: int, into: bytearray, bound: int) -> bool:
        nonlocal running
        more = read(fd, into, bound)
        running |= b"failure" in into
        return more

    def clock() -> float:
        nonlocal late
        late += next(left, 0.0) if running else 0.0
        return monotonic() + late

    monkeypatch.setattr(supervision, "_read", reading)
    monkeypatch.setattr(supervision, "monotonic", clock)
    code = f"import time\ndef double(x):\n    if x == 7: {end}\n    return x + x"
    with pytest.raises(SandboxFailure, match=r"of the 4 s of a program this machine stood still for \d"):
        grade(sandbox, code, EXAM)


def test_broken_tests_are_no_verdict(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailure, match="the tests are at fault: SyntaxError"):
        grade(sandbox, "def f(x): return x", Exam("f", ["assert candidate(1) = 1"]))
    with pytest.raises(SandboxFailure, match="the tests are at fault: NameError"):
        grade(sandbox, "def f(x): return x", Exam("f", ["assert candidate(1) == 1"], "undefined"))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(PLAIN | st.frozensets(st.integers()) | st.sets(st.text()))
def test_plain_values_come_back_as_they_were(value: object) -> None:
    again = decode(encode(value))
    assert again == value and type(again) is type(value)


# --- isolation that is not there ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_lesser_isolation_must_be_named_and_is_labelled(sandbox: Sandbox) -> None:
    lesser = Sandbox(LIMITS, isolation="rlimits")
    result = lesser.run(
        [lesser.python, "-I", "-S", "note.py"], {"note.py": "import os; print(os.getuid(), os.getcwd())"}
    )
    user, work = result.stdout.split()
    assert result.isolation == "rlimits" and user != b"0" and not os.path.exists(work)
    assert lesser.run([lesser.python, "-I", "-S", "-c", "while True: pass"]).exit_code == 128 + 9
    assert grade(lesser, "def double(x): return x + x", EXAM).isolation == "rlimits"
    with pytest.raises(ValueError, match=r"isolation \('none'\) must be 'full' or 'rlimits'"):
        Sandbox(isolation="none")  # type: ignore[arg-type]


def test_a_machine_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `bwrap` that is missing, then one that does not do its work."""
    module._starter.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "which", lambda *_, **__: None)
            with pytest.raises(SandboxUnavailable, match=r"'bwrap' is missing; install it .*'rlimits' by name"):
                Sandbox()
        which = shutil.which
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "which", lambda name, **k: which("false" if name == "bwrap" else name, **k))
            with pytest.raises(SandboxUnavailable, match=r"was not started: .*; allow unprivileged user namespaces"):
                Sandbox()
    finally:
        module._starter.cache_clear()


def test_a_kernels_setting_that_forbids_namespaces_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    setting = tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns"
    setting.write_text("1\n")
    assert allow_namespaces(tmp_path) == "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`"
    setting.write_text("0\n")
    assert allow_namespaces(tmp_path).startswith("allow unprivileged user namespaces")


def test_an_unknown_processor_has_no_filter() -> None:
    with pytest.raises(SandboxUnavailable, match="no filter of system calls for the processor 'riscv64'"):
        seccomp.program("riscv64")
    assert len(seccomp.program("aarch64")) % 8 == 0


def test_limits_must_make_sense() -> None:
    with pytest.raises(ValueError, match=r"seconds \(0\) must be positive"):
        Limits(seconds=0)
    with pytest.raises(ValueError, match=r"memory_mb \(8\) must be at least 64"):
        Limits(memory_mb=8)
