"""Runs inside a sandbox: tests on one side, the code under test on the other, as two processes joined by pipes.

    host     --stdin-->   grader   --arguments-->   code under test
    host     <--stdout--  grader   <--results----

Invariants
- The code's process is forked before the grader reads the tests and the secret, so neither ever was in its memory;
  it has no descriptor of the grader's input and output. What it sees of a test are the arguments of its calls.
- What comes back from it is decoded to plain values: comparing them runs nothing of its making.
- Every line for the host carries the secret. Whatever the code does (exit, print, kill the grader), a test passes
  only if the grader saw it pass.

This file is sent into the sandbox as text: it imports the standard library only, and nothing of this project.
"""

import json
import os
import random
import sys

LONGEST_RESULT = 2**20
SHOWN = 200


def encode(value):
    """Plain values as JSON types; containers are tagged, for JSON knows neither tuples nor sets."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    raise TypeError(f"a {type(value).__name__} can not be compared")


def decode(value):
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {decode(k): decode(v) for k, v in items}
    if kind == "complex":
        return complex(*items)
    if kind == "bytes":
        return bytes(items)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[kind](decode(item) for item in items)


def named(error):
    return f"{type(error).__name__}: {error}"[:SHOWN]


def serve(calls, results):
    """The code's side: load it, then answer one call after the other."""

    def answer(**parts):
        results.write(json.dumps(parts) + "\n")
        results.flush()

    job = json.loads(calls.readline())
    space: dict = {"__name__": "solution"}
    try:
        exec(compile(job["preamble"], "preamble", "exec"), space)
        stub = space.pop(job["entry_point"], None)
        exec(compile(job["code"], "solution", "exec"), space)
        function = space.get(job["entry_point"], stub)
        if function is stub:
            raise NameError(f"the code does not define {job['entry_point']}")
        answer(ok=True)
    except BaseException as error:
        answer(error=named(error))
        return
    for line in calls:
        try:
            arguments, keywords = decode(json.loads(line))
            answer(value=encode(function(*arguments, **keywords)))
        except BaseException as error:
            answer(error=named(error))


class Failed(Exception):
    """The code raised, ended, or gave what is no plain value."""


class Candidate:
    """What the tests call in place of the code."""

    def __init__(self, calls, results):
        self._calls, self._results = calls, results
        self.shown = ""

    def load(self, preamble, code, entry_point):
        self._ask({"preamble": preamble, "code": code, "entry_point": entry_point})

    def __call__(self, *arguments, **keywords):
        self.shown = ""
        value = decode(self._ask(encode((arguments, keywords))).get("value"))
        self.shown = repr(value)[:SHOWN]
        return value

    def _ask(self, question):
        try:
            self._calls.write(json.dumps(question) + "\n")
            self._calls.flush()
            line = self._results.readline(LONGEST_RESULT)
        except OSError:
            line = ""
        if not line:
            raise Failed("the program ended: it exited, or used more memory or processor time than it may")
        if not line.endswith("\n"):
            raise Failed("the result is too long")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return answer


def run(test, job, candidate):
    """None if the test passes, else why not. A test may also call the code by its own name."""
    space = {"__name__": "tests"}
    random.seed(0)
    exec(compile(job["preamble"], "preamble", "exec"), space)
    space["candidate"] = space[job["entry_point"]] = candidate
    try:
        exec(test, space)
    except AssertionError:
        return f"got {candidate.shown}"
    except Failed as error:
        return str(error)
    except Exception as error:  # what came back is not what the test can work with
        return f"got {candidate.shown}, and then {named(error)}"
    return None


def main():
    asked, calls = os.pipe()
    results, answered = os.pipe()
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        for fd in (nothing, calls, results):
            os.close(fd)
        serve(os.fdopen(asked), os.fdopen(answered, "w"))
        os._exit(0)
    os.close(asked)
    os.close(answered)
    job = json.loads(sys.stdin.buffer.read())
    candidate = Candidate(os.fdopen(calls, "w"), os.fdopen(results))

    def tell(**parts):
        print(json.dumps({"secret": job["secret"], **parts}), flush=True)

    try:
        compiled = [compile(test, "test", "exec") for test in job["tests"]]
        exec(compile(job["preamble"], "preamble", "exec"), {"__name__": "tests"})
    except Exception as error:
        tell(fault=named(error))
        return
    tell(ready=True)
    try:
        candidate.load(job["preamble"], job["code"], job["entry_point"])
    except (Failed, ValueError) as error:
        tell(unusable=str(error))
        return
    for test in compiled:
        tell(failure=run(test, job, candidate))


if __name__ == "__main__":
    main()
