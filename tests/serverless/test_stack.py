"""Deployment: the template is one that AWS takes, and CloudFormation is asked for what the function needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import yaml
from botocore.stub import ANY, Stubber
from cfnlint import api

from infra.serverless import stack
from infra.serverless.bundle import Bundle, Function, architecture, runtime
from infra.serverless.client import PAYLOADS
from infra.serverless.errors import DeploymentFailed, FunctionMissing
from infra.serverless.local import HANDLER
from infra.services.endpoints import S3Endpoint
from infra.store.objects import ObjectStore

VALUES = stack.parameters(Function("math", 1024, 30, {}), "p", "bucket", "bundles/1.zip")


def lint(text: str) -> list[str]:
    return [str(match) for match in api.lint(text, config=api.ManualArgs(regions=["us-east-1", "eu-central-1"]))]


def test_the_template_is_valid() -> None:
    assert lint(stack.template()) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("Handler: rewards.handler.handler", "Handlr: rewards.handler.handler"),
        ("MemorySize: !Ref MemoryMb", "MemorySize: many"),
        ("AWS::Logs::LogGroup", "AWS::Logs::LogGrup"),
        ("!Ref TimeoutS", "!Ref Timeout"),
    ],
)
def test_the_linter_would_see_a_mistake(right: str, wrong: str) -> None:
    assert right in stack.template() and lint(stack.template().replace(right, wrong))


def test_the_template_takes_what_is_given_and_says_what_the_code_says() -> None:
    text = stack.template()
    tree = yaml.safe_load(re.sub(r"!(\w+)", "", text))
    assert set(tree["Parameters"]) == set(VALUES)
    assert runtime() in tree["Parameters"]["Runtime"]["AllowedValues"]
    assert architecture() in tree["Parameters"]["Architecture"]["AllowedValues"]
    assert tree["Resources"]["Reward"]["Properties"]["Handler"] == HANDLER
    assert f"/{PAYLOADS}*" in text


@pytest.fixture
def cloud() -> Iterator[tuple[Any, Stubber]]:
    """A client whose requests are checked against AWS's service model, and whose answers are scripted."""
    client = boto3.client(
        "cloudformation", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none"
    )
    with Stubber(client) as stub:
        yield client, stub
        stub.assert_no_pending_responses()


def state(status: str) -> dict[str, Any]:
    return {"Stacks": [{"StackName": "p-math", "CreationTime": "2026-01-01T00:00:00Z", "StackStatus": status}]}


ASKED = {
    "StackName": "p-math",
    "TemplateBody": stack.template(),
    "Capabilities": ["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"],
    "Parameters": [{"ParameterKey": k, "ParameterValue": v} for k, v in VALUES.items()],
}


def absent(stub: Stubber) -> None:
    stub.add_client_error("describe_stacks", "ValidationError", "Stack with id p-math does not exist")


def test_a_new_function_is_created(cloud: tuple[Any, Stubber]) -> None:
    client, stub = cloud
    absent(stub)
    stub.add_response("create_stack", {"StackId": "s"}, {**ASKED, "OnFailure": "DELETE"})
    stub.add_response("describe_stacks", state("CREATE_COMPLETE"), {"StackName": "p-math"})
    assert stack.deploy(VALUES, "us-east-1", client) == "created"


def test_a_known_function_is_updated_or_left_alone(cloud: tuple[Any, Stubber]) -> None:
    client, stub = cloud
    stub.add_response("describe_stacks", state("CREATE_COMPLETE"))
    stub.add_response("update_stack", {"StackId": "s"}, ASKED)
    stub.add_response("describe_stacks", state("UPDATE_COMPLETE"))
    assert stack.deploy(VALUES, "us-east-1", client) == "updated"
    stub.add_response("describe_stacks", state("UPDATE_COMPLETE"))
    stub.add_client_error("update_stack", "ValidationError", "No updates are to be performed.")
    assert stack.deploy(VALUES, "us-east-1", client) == "unchanged"


def test_a_stack_that_fails_tells_cloudformations_reason(cloud: tuple[Any, Stubber]) -> None:
    client, stub = cloud
    absent(stub)
    stub.add_response("create_stack", {"StackId": "s"}, ANY_STACK)
    stub.add_response("describe_stacks", state("ROLLBACK_COMPLETE"))
    failure = {
        "StackId": "s",
        "EventId": "e",
        "StackName": "p-math",
        "Timestamp": "2026-01-01T00:00:00Z",
        "LogicalResourceId": "Reward",
        "ResourceStatus": "CREATE_FAILED",
        "ResourceStatusReason": "no permission",
    }
    stub.add_response("describe_stack_events", {"StackEvents": [failure]})
    with pytest.raises(DeploymentFailed, match=r"stack p-math was not created .*: Reward: no permission"):
        stack.deploy(VALUES, "us-east-1", client)


ANY_STACK = dict.fromkeys(("StackName", "TemplateBody", "Capabilities", "Parameters", "OnFailure"), ANY)


def test_a_denied_deployment_is_a_named_error(cloud: tuple[Any, Stubber]) -> None:
    client, stub = cloud
    stub.add_client_error("describe_stacks", "AccessDenied", "not allowed")
    with pytest.raises(DeploymentFailed, match=r"stack p-math: .*AccessDenied"):
        stack.deploy(VALUES, "us-east-1", client)


@pytest.mark.server
def test_a_bundle_is_uploaded_once_under_its_digest(s3: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(s3.client(), s3.bucket)
    bundle = Bundle((Function("f", 128, 1, {}),), ("rl",))
    key = stack.upload(bundle, store)
    assert key.startswith(stack.BUNDLES) and store.get(key)[:2] == b"PK"
    monkeypatch.setattr(store, "put", None)  # a second upload would call it
    assert stack.upload(bundle, store) == key


def test_logs_are_read_in_order_and_a_missing_group_is_named() -> None:
    client = boto3.client("logs", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none")
    with Stubber(client) as stub:
        asked = {"logGroupName": "/aws/lambda/p-math", "startTime": 5}
        events = [{"message": "one\n"}, {"message": "two"}]
        stub.add_response("filter_log_events", {"events": events[:1], "nextToken": "n"}, asked)
        stub.add_response("filter_log_events", {"events": events[1:]}, asked | {"nextToken": "n"})
        assert list(stack.log_lines("p-math", 5, "us-east-1", client)) == ["one", "two"]
        stub.add_client_error("filter_log_events", "ResourceNotFoundException")
        with pytest.raises(FunctionMissing, match="is p-math deployed in us-east-1"):
            list(stack.log_lines("p-math", 5, "us-east-1", client))
