"""`rollmill env`: what a person sees and may type."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from flows.cli import app

RUNNER = CliRunner()


def run(*arguments: str, typed: str = "") -> tuple[int, str]:
    result = RUNNER.invoke(app, ["env", *arguments], input=typed, env={"COLUMNS": "200"})
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_list_names_every_environment_that_ships() -> None:
    code, output = run("list")
    assert code == 0 and "calculator" in output and "frozen_lake" in output


def test_a_person_may_call_tools_by_name_and_answer() -> None:
    typed = ":add a=1 b=2\n:add a=x\n:nothing\n:add a=1 b=5000\n12\\\n3\n"
    code, output = run("play", "tests.envs.quiz:Quiz", "--set", "largest=50", typed=typed)
    assert code == 0
    for line in (
        'tool schema  {"name": "add"',
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        "tool  3",
        "mistake  bad_arguments",
        "not said  :nothing is none of :expert, :random, :quit, :add",
        "mistake  tool_error",
        "reward  0",
        "end  4 turns, reward 0",
    ):
        assert line in output, output


def test_the_expert_plays_for_a_person() -> None:
    code, output = run("play", "calculator", "--seed", "3", "--split", "heldout", typed=":expert\n" * 6)
    assert code == 0 and "reward 1" in output and 'info  {"end": "right"}' in output


def test_the_end_of_input_gives_up() -> None:
    code, output = run("play", "frozen_lake")
    assert code == 0 and "end  0 turns, reward 0" in output


def test_a_check_says_what_holds_and_what_does_not() -> None:
    code, output = run("check", "tests.envs.quiz:Quiz", "--problems", "10")
    assert code == 0 and "at random 0.00, expert 1.00" in output and "no" not in output.split("mend")[1].split()
    code, output = run("check", "tests.envs.test_check:Easy", "--problems", "10")
    assert code == 1 and "at random 1.00" in output and "random_action" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "calculater"], ["calculater", "did you mean 'calculator'"]),
        (["play", "calculator", "--set", "sise=3"], ["sise", "unknown option"]),
        (["play", "calculator", "--set", "largest"], ["--set 'largest'", "option=value"]),
        (["play", "calculator", "--split", "test"], ["--split 'test'", "heldout"]),
        (["play", "tests.envs.test_check:WrongOpening"], ["reset gave", "no list of Messages"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: list[str]) -> None:
    code, output = run(*arguments)
    assert code == 2 and len(output.strip().splitlines()) == 1, output
    assert all(word in output for word in words), output
