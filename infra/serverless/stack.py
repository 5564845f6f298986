"""Functions on AWS: the bundle in S3, one CloudFormation stack for each function, logs in CloudWatch.

Invariants: deploying twice what has not changed changes nothing; a stack is in its new state when `deploy` returns, or
there is a named error with CloudFormation's own reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError, WaiterError

from infra.serverless.bundle import Bundle, Function, architecture, runtime
from infra.serverless.errors import DeploymentFailed, FunctionMissing
from infra.store.objects import ObjectStore

BUNDLES = "_rollmill/bundles/"
DEADLINE_S = 600
_PERIOD_S = 5
_CAPABILITIES = ["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"]


def template() -> str:
    """The SAM template of one function."""
    return (files("infra.serverless") / "template.yaml").read_text()


def upload(bundle: Bundle, store: ObjectStore) -> str:
    """Put the bundle into the bucket, unless it is there; its key. Raises BundleError, StoreError."""
    with TemporaryDirectory() as directory:
        package = Path(directory) / "bundle.zip"
        key = f"{BUNDLES}{bundle.write_zip(package)}.zip"
        if not store.exists(key):
            store.put(key, package.read_bytes())
    return key


def parameters(function: Function, prefix: str, bucket: str, key: str) -> dict[str, str]:
    """The template's parameters for one function."""
    return {
        "FullName": f"{prefix}-{function.name}",
        "ShortName": function.name,
        "Bucket": bucket,
        "BundleKey": key,
        "Runtime": runtime(),
        "Architecture": architecture(),
        "MemoryMb": str(function.memory_mb),
        "TimeoutS": str(function.timeout_s),
    }


def deploy(values: dict[str, str], region: str, client: Any = None) -> str:
    """Bring one function's stack to these parameters; what was done: created, updated, unchanged."""
    cloud = client or boto3.session.Session().client("cloudformation", region_name=region)
    name = values["FullName"]
    wanted = {
        "StackName": name,
        "TemplateBody": template(),
        "Capabilities": _CAPABILITIES,
        "Parameters": [{"ParameterKey": k, "ParameterValue": v} for k, v in values.items()],
    }
    try:
        done = "updated" if _exists(cloud, name) else "created"
        if done == "created":
            cloud.create_stack(**wanted, OnFailure="DELETE")
        else:
            cloud.update_stack(**wanted)
        waiter = cloud.get_waiter("stack_update_complete" if done == "updated" else "stack_create_complete")
        waiter.wait(StackName=name, WaiterConfig={"Delay": _PERIOD_S, "MaxAttempts": DEADLINE_S // _PERIOD_S})
    except ClientError as error:
        if "No updates are to be performed" in str(error):
            return "unchanged"
        raise DeploymentFailed(f"stack {name}: {error}") from error
    except WaiterError as error:
        raise DeploymentFailed(f"stack {name} was not {done} within {DEADLINE_S} s: {_reason(cloud, name)}") from error
    except BotoCoreError as error:
        raise DeploymentFailed(f"stack {name}: {error}") from error
    return done


def log_lines(full_name: str, since_ms: int, region: str, client: Any = None) -> Iterator[str]:
    """What a function logged since a time (milliseconds since the epoch), oldest first. Raises FunctionMissing."""
    logs = client or boto3.session.Session().client("logs", region_name=region)
    group = f"/aws/lambda/{full_name}"
    try:
        for page in logs.get_paginator("filter_log_events").paginate(logGroupName=group, startTime=since_ms):
            yield from (event["message"].rstrip("\n") for event in page["events"])
    except (ClientError, BotoCoreError) as error:
        raise FunctionMissing(f"no log {group} can be read: {error}; is {full_name} deployed in {region}?") from error


def _exists(cloud: Any, name: str) -> bool:
    try:
        cloud.describe_stacks(StackName=name)
    except ClientError as error:
        if "does not exist" in str(error):
            return False
        raise
    return True


def _reason(cloud: Any, name: str) -> str:
    """The first failure of the newest events."""
    try:
        events = cloud.describe_stack_events(StackName=name)["StackEvents"]
    except (ClientError, BotoCoreError) as error:
        return str(error)
    failures = [e for e in events if "FAILED" in e["ResourceStatus"]]
    return "; ".join(f"{e['LogicalResourceId']}: {e.get('ResourceStatusReason', '')}" for e in failures[-1:]) or "late"
