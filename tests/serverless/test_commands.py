"""`rollmill rewards`: what a person types and sees."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from pathlib import Path

import boto3
import pytest
from botocore.stub import ANY, Stubber
from typer.testing import CliRunner

from flows.cli import app
from infra.serverless import stack
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from tests.serverless.conftest import Serve


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["rewards", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["rewards", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    return result.output


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_list_shows_what_runs_where() -> None:
    lines = {line.split("│")[1].strip(): line for line in run("list").splitlines() if "│" in line}
    assert "1024 MB" in lines["math"] and "math-verify" in lines["math"] and "MB" not in lines["outcome"]


def test_bundle_writes_a_package(tmp_path: Path) -> None:
    told = run("bundle", "math", "--to", str(tmp_path / "b.zip"))
    assert "Lambda's limit: 250" in told
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert list(json.loads(archive.read("rollmill.json"))) == ["math"]


@pytest.mark.slow
def test_invoke_and_logs_on_this_machine() -> None:
    told = run("invoke", "math", "--said", r"so \boxed{0.5}", "--info", "{answer: 1/2}", "--local")
    assert '"math": 1.0' in told and "REPORT" in told
    assert "REPORT" in run("logs", "math", "--local")


@pytest.mark.slow
def test_invoke_where_the_environment_says(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", served.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    told = run("invoke", "toy_rewards:poison", "--said", "x", "--option", "what=nan", "--prefix", "t")
    assert "not a finite number" in told
    elsewhere = refused("invoke", "toy_rewards:good", "--said", "x", "--prefix", "other")
    assert "function other-toys: ResourceNotFound" in elsewhere


def test_mistakes_are_one_line() -> None:
    assert "'outcome' is no function" in refused("invoke", "outcome", "--said", "x")
    assert "nothing is named 'maths'; did you mean 'math'?" in refused("logs", "maths")
    assert "was never started here" in refused("logs", "math", "--local")
    assert "not YAML" in refused("invoke", "math", "--said", "x", "--info", "{a: [", "--local")
    assert "--info '{a: 2024-01-01}': " in refused("invoke", "math", "--said", "x", "--info", "{a: 2024-01-01}")
    assert "not YAML" in refused("invoke", "math", "--said", "x", "--option", "tag=[", "--local")
    assert "--info 'x' is not a mapping" in refused("invoke", "math", "--said", "x", "--info", "x", "--local")


def test_deploy_uploads_the_bundle_and_makes_the_stack(own_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore.connect(StoreSection(bucket="my-bucket"))
    store.ensure_bucket()
    cloud = boto3.client("cloudformation", region_name="us-east-1")
    with Stubber(cloud) as stub:
        name = {"StackName": "rollmill-reward-math"}
        stub.add_client_error("describe_stacks", "ValidationError", "Stack with id rollmill-reward-math does not exist")
        told = {"TemplateBody": ANY, "Capabilities": ANY, "Parameters": ANY, "OnFailure": "DELETE"}
        stub.add_response("create_stack", {"StackId": "s"}, name | told)
        state = {"CreationTime": "2026-01-01T00:00:00Z", "StackStatus": "CREATE_COMPLETE"}
        stub.add_response("describe_stacks", {"Stacks": [name | state]}, name)
        monkeypatch.setattr(stack, "deploy", partial(stack.deploy, client=cloud))
        assert "rollmill-reward-math: created" in run("deploy", "--bucket", "my-bucket", "math")
        stub.assert_no_pending_responses()
    (key,) = store.keys("")
    assert key.endswith(".zip")
