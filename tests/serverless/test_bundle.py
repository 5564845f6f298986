"""The deployment package: complete, small enough, the same for the same content, and nothing that Lambda refuses."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infra.serverless import bundle as bundles
from infra.serverless.bundle import LIMIT_BYTES, MANIFEST, Bundle, Function, closure, link_runtime, read_manifest
from infra.serverless.errors import BundleError
from infra.serverless.instance import Layout
from rewards.registry import names, reward_function
from rl.errors import ConfigError
from rl.serverless import Serverless, merged, serverless, serverless_of
from tasks.functions import bundle_of
from tests.serverless.conftest import running, view

EMPTY = Bundle((Function("f", 128, 1, {}),), ("rewards", "rl"))


def shipped() -> Bundle:
    """What `rollmill rewards deploy` takes by default."""
    return bundle_of(name for name in names() if serverless_of(reward_function(name)) is not None)


def test_all_shipped_functions_fit_well_into_lambda() -> None:
    bundle = shipped()
    bundle.check()
    assert bundle.unpacked_bytes < LIMIT_BYTES / 4
    assert "rewards/handler.py" in bundle.files and "sympy/__init__.py" in bundle.files
    assert not any("__pycache__" in name or name.startswith(("boto3/", "pydantic/", "infra/")) for name in bundle.files)


@pytest.mark.slow
def test_the_package_unpacks_to_functions_that_run(tmp_path: Path) -> None:
    bundle, package = shipped(), tmp_path / "b.zip"
    digest = bundle.write_zip(package)
    assert bundle.write_zip(tmp_path / "again.zip") == digest
    layout = Layout(tmp_path / "code", tmp_path / "runtime", tmp_path)
    with zipfile.ZipFile(package) as archive:
        assert sum(entry.file_size for entry in archive.infolist()) == bundle.unpacked_bytes
        archive.extractall(layout.code)
    link_runtime(layout.runtime)
    functions = read_manifest((layout.code / MANIFEST).read_text())
    event = {"reward": "math", "options": {}, "views": [view(r"\boxed{2/4}", answer="0.5").as_json()]}
    with running({f"t-{n}": f for n, f in functions.items()}, layout, 1, 60, "rewards.handler.handler") as served:
        assert served.client().invoke("math", event, 120).value == {"results": [{"parts": {"math": 1.0}}]}


def test_the_manifest_names_every_function_with_its_rewards(toy_bundle: Bundle) -> None:
    found = read_manifest(toy_bundle.manifest)
    assert list(found.values()) == list(toy_bundle.functions)
    assert found["toys"].rewards["toy_rewards:good"] == "toy_rewards:good"
    assert "toy_rewards/__init__.py" in toy_bundle.files


def test_what_a_distribution_needs_comes_with_it() -> None:
    found = [d.metadata["Name"].lower() for d in closure(["math-verify"])]
    assert {"math-verify", "sympy", "mpmath", "latex2sympy2_extended"} <= set(found)
    assert "pytest" not in found  # an extra that was not asked for
    assert not {"boto3", "botocore"} & {d.metadata["Name"] for d in closure(["s3transfer"], without=["boto3"])}


def test_a_requirement_that_is_not_installed_names_the_mend() -> None:
    with pytest.raises(BundleError, match="requires 'no-such-thing', which is not installed"):
        Bundle(EMPTY.functions, (), ("no-such-thing",)).check()


def test_a_package_that_is_none_is_named() -> None:
    with pytest.raises(BundleError, match="'nowhere' can not be found"):
        Bundle(EMPTY.functions, ("nowhere",)).check()


def test_code_compiled_for_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles.sys, "platform", "darwin")
    EMPTY.check()
    with pytest.raises(BundleError, match="numpy is compiled for darwin"):
        Bundle(EMPTY.functions, (), ("numpy",)).check()


def test_a_bundle_that_lambda_would_refuse_is_refused_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundles, "LIMIT_BYTES", EMPTY.unpacked_bytes)
    with pytest.raises(BundleError, match=r"the bundle of f unpacks to .* deploy fewer rewards"):
        EMPTY.write_zip(tmp_path / "b.zip")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"function": "Bad Name"}, "'Bad Name' is no name"),
        ({"function": "f", "memory_mb": 64}, r"memory_mb \(64\) must be from 128"),
        ({"function": "f", "timeout_s": 1000}, r"timeout_s \(1000\) must be from 1"),
    ],
)
def test_a_mark_that_lambda_refuses_is_an_error_at_once(mark: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serverless(**mark)


def test_a_marked_function_stays_what_it_is() -> None:
    def reward(view: object) -> dict[str, float]:
        return {"r": 1.0}

    marked = serverless("f", memory_mb=256, requires=["b", "a"])(reward)
    assert marked is reward and marked(None) == {"r": 1.0}
    assert merged([Serverless("f", 256, 10, ("b",)), Serverless("f", 128, 60, ("a",))]) == Serverless(
        "f", 256, 60, ("a", "b")
    )


def test_the_handler_needs_no_more_than_our_own_code(tmp_path: Path) -> None:
    """Not even pydantic, which is compiled: functions without requirements run on any machine."""
    EMPTY.link(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import rewards.handler"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(tmp_path)], check=True, timeout=60)
