"""Grades code by tests in a sandbox, so that the code can neither see the tests nor claim to have passed.

Invariants
- A test passes only if the grader (infra/sandbox/grader.py), which the code can not read or write, reports it under
  the secret of this very run.
- A run that is ended early (by a limit, or by the code) loses the tests that were not reached; they count as failed.
- If the grader did not even start, the machine stood still, or the tests can not be compiled, that is a SandboxFailure
  and no verdict.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.sandbox.errors import SandboxFailure
from infra.sandbox.sandbox import Result, Sandbox
from infra.sandbox.supervision import Isolation

_GRADER = Path(__file__).with_name("grader.py").read_text()


@dataclass(frozen=True)
class Exam:
    """What code has to pass. `tests` are Python statements that call `candidate`, which stands for the code's function
    `entry_point`, and assert something; `preamble` is run before the code and before every test, and is no secret."""

    entry_point: str
    tests: Sequence[str]
    preamble: str = ""


@dataclass(frozen=True)
class Verdict:
    """`failures` has one entry per test, in order: None if it passed, else what a programmer would want to know."""

    failures: tuple[str | None, ...]
    isolation: Isolation
    unusable: str | None = None
    """Why the code could not even be loaded."""

    @property
    def passed(self) -> int:
        return self.failures.count(None)


def grade(sandbox: Sandbox, code: str, exam: Exam) -> Verdict:
    """Blocks. Raises SandboxFailure."""
    secret = secrets.token_hex(16)
    return _verdict(sandbox.run(_argv(sandbox), {"grader.py": _GRADER}, _job(secret, code, exam)), secret, exam)


async def agrade(sandbox: Sandbox, code: str, exam: Exam) -> Verdict:
    """As `grade`. Cancelling it kills the program."""
    secret = secrets.token_hex(16)
    return _verdict(await sandbox.arun(_argv(sandbox), {"grader.py": _GRADER}, _job(secret, code, exam)), secret, exam)


def _argv(sandbox: Sandbox) -> list[str]:
    return [sandbox.python, "-I", "-S", "-B", "grader.py"]


def _job(secret: str, code: str, exam: Exam) -> bytes:
    job = {"secret": secret, "code": code, "entry_point": exam.entry_point, "preamble": exam.preamble}
    return json.dumps(job | {"tests": list(exam.tests)}).encode()


def _verdict(result: Result, secret: str, exam: Exam) -> Verdict:
    lines = [line for line in map(_parse, result.stdout.splitlines()) if line.get("secret") == secret]
    if not lines:
        said = result.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxFailure(
            f"sandbox: the grader did not start: exit code {result.exit_code}, bound broken: {result.broken}; {said}"
        )
    if "fault" in lines[0]:
        raise SandboxFailure(f"sandbox: the tests are at fault: {lines[0]['fault']}")
    unusable = next((line["unusable"] for line in lines if "unusable" in line), None)
    failures = [line["failure"] for line in lines if "failure" in line]
    missing = f"the limit on {result.broken} was broken" if result.broken else "the program ended the tests"
    failures += [unusable or missing] * (len(exam.tests) - len(failures))
    return Verdict(tuple(failures), result.isolation, unusable)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
