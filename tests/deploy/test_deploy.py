"""The container image, docker-compose and the Kubernetes manifests, as far as can be seen without running them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from typer.main import get_command

from flows.cli import app
from infra.services.servers import PREFECT_SETTINGS
from rl.config.load import parse
from rl.placement import HardwareClass

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PROGRAMS = ("rollmill", "prefect", "mlflow", "dask", "python")


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())


def kube() -> list[dict[str, Any]]:
    return [tree for path in MANIFESTS for tree in yaml.safe_load_all(path.read_text())]


def pods() -> Iterator[dict[str, Any]]:
    for tree in kube():
        if tree["kind"] in ("Deployment", "StatefulSet"):
            yield tree["spec"]["template"]["spec"]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in pod["containers"]]


def check_rollmill(words: list[str]) -> None:
    node = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    node.make_context(words[0], list(words[1:]))


def test_compose_is_as_the_specification_says() -> None:
    found = PyCompose.from_yaml(yaml.safe_dump(compose()))
    found.validate_configs()
    found.validate_volumes()
    for wrong in ({"imagee": "x"}, {"image": "x", "depends_on": 3}):
        tree = compose()
        tree["services"]["wrong"] = wrong
        with pytest.raises(ValueError):
            PyCompose.from_yaml(yaml.safe_dump(tree))


def test_compose_hangs_together_and_is_on_loopback_only() -> None:
    tree = compose()
    for name, service in tree["services"].items():
        assert set(service.get("depends_on", ())) <= tree["services"].keys(), name
        for depended, on in (
            service.get("depends_on", {}).items() if isinstance(service.get("depends_on"), dict) else ()
        ):
            healthy = on["condition"] == "service_healthy"
            assert not healthy or "healthcheck" in tree["services"][depended], (name, depended)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service.get("volumes", ()):
            assert volume.startswith("./") or volume.split(":")[0] in tree["volumes"], volume
        assert {config["source"] for config in service.get("configs", ())} <= tree["configs"].keys()
        command = service.get("command")
        if command and "seaweedfs" not in service["image"]:
            assert command[0] in PROGRAMS, name
        if command and command[0] == "rollmill":
            check_rollmill(command[1:])


def test_compose_has_no_secret_and_starts_without_none() -> None:
    text = (DEPLOY / "docker-compose.yaml").read_text()
    for name in ("POSTGRES_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert re.findall(rf"\$\{{{name}(?!:\?)", text) == [], "docker compose refuses to start where one is missing"
    assert "latest" not in text


def test_prefect_has_the_settings_of_the_embedded_server() -> None:
    (container,) = (c for pod in pods() for c in pod["containers"] if c.get("args", [])[:2] == ["prefect", "server"])
    told = {one["name"]: one["value"] for one in container["env"]}
    for found in (told, compose()["services"]["prefect"]["environment"]):
        assert PREFECT_SETTINGS.items() <= {name: str(value).strip() for name, value in found.items()}.items()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_as_kubernetes_says(path: Path) -> None:
    for tree in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(tree, "1.31", strict=True)
    tree["spec"]["nonsense"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(tree, "1.31", strict=True)


def test_manifests_hang_together() -> None:
    named = {(tree["kind"], tree["metadata"]["name"]) for tree in kube()}
    told = (ROOT / "docs" / "production.md").read_text()
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        claims = {"home"}
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in told, "a secret that the page does not tell how to make"
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys() | claims
            for source in container.get("envFrom", ()):
                if "secretRef" in source:
                    assert source["secretRef"]["name"] in told
                else:
                    assert ("ConfigMap", source["configMapRef"]["name"]) in named
    for tree in kube():
        if tree["kind"] == "Service":
            labels = [t["spec"]["template"]["metadata"]["labels"] for t in kube() if "template" in t.get("spec", {})]
            assert any(tree["spec"]["selector"].items() <= label.items() for label in labels), tree["metadata"]


def test_nothing_is_privileged_and_everything_has_limits() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    for container in containers():
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert "memory" in container["resources"]["limits"], container["name"]
        assert container["args"][0] in PROGRAMS
        if container["args"][0] == "rollmill":
            check_rollmill(container["args"][1:])


def test_the_cluster_offers_what_its_configuration_asks_for() -> None:
    (runs,) = (tree["data"] for tree in kube() if tree["metadata"]["name"] == "rollmill-runs")
    config = parse(runs["my-run.yaml"], "my-run.yaml")
    offered: dict[str, int] = {}
    for tree in kube():
        if tree["kind"] not in ("Deployment", "StatefulSet"):
            continue
        for container in tree["spec"]["template"]["spec"]["containers"]:
            args = container["args"]
            if args[:2] != ["dask", "worker"]:
                continue
            assert args[2] == config.pools.address, "every worker joins the scheduler of the configuration"
            name, amount = args[args.index("--resources") + 1].split("=")
            assert args[args.index("--nthreads") + 1] == amount
            offered[name] = offered.get(name, 0) + int(amount) * tree["spec"]["replicas"]
            gpus = container["resources"]["limits"].get("nvidia.com/gpu")
            assert (gpus is not None) == name.endswith("_gpu")
    assert offered.keys() == {c.value for c in HardwareClass}
    assert all(offered[name] >= count for name, count in config.engine.counts.items())
    assert offered["cpu"] >= config.training.groups_per_step * config.training.group_size
    assert config.pools.host == config.pools.address.removeprefix("tls://").partition(":")[0]


def test_dask_finds_its_certificate_by_the_names_in_the_manifests() -> None:
    import dask.config

    for container in containers():
        names = {
            entry["name"]: entry["value"] for entry in container.get("env", ()) if entry["name"].startswith("DASK_")
        }
        if not names:
            continue
        found = dask.config.collect_env(names)["distributed"]["comm"]["tls"]
        assert found["ca-file" if "ca-file" in found else "ca_file"] == "/tls/ca.pem"
        assert {"scheduler", "worker", "client"} & found.keys()


def test_the_image_copies_what_there_is_and_runs_as_nobody_special() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    names = [name for _, name in stages]
    assert {"cpu", "cuda"} <= set(names)
    for at, (base, _) in enumerate(stages):
        assert base in names[:at] or ":" in base, base
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    for stage in text.split("FROM ")[1:]:
        if stage.split(" AS ")[1].split()[0] in ("cpu", "cuda"):
            assert "USER rollmill" in stage and stage.index("USER rollmill") < stage.index("CMD")
    extras = set(re.findall(r"'\.\[([a-z,]+)\]'", text)[0].split(","))
    told = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in told for extra in extras)
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    for link in (path for package in packages for path in (ROOT / package).rglob("*") if path.is_symlink()):
        assert str(link.resolve().relative_to(ROOT)).partition("/")[0] in kept, f"{link} leads nowhere in the image"
    assert packages <= kept and {"requirements.lock", "pyproject.toml", "README.md", "LICENSE"} <= kept
