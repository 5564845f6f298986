"""What is deployed: the code of functions with all that it imports, from what is installed here.

    rewards/ rl/ math_verify/ sympy/ ...     as they are in this environment: what was tested is what runs
    rollmill.json                            name of each function -> its memory, timeout and rewards

Invariants: complete without the distribution's own site-packages and without network; the same content gives the same
bytes, so that the digest names the version; code that is compiled for another system or Python than the function's is
refused by name, as is a bundle above Lambda's limit.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.serverless.errors import BundleError

LIMIT_BYTES = 250 * 1024 * 1024
"""Lambda's limit on what a function unpacks to."""
MANIFEST = "rollmill.json"
RUNTIME = ("awslambdaric", "boto3")
"""What Lambda's Python runtime has installed already."""
_LEFT_OUT = {"__pycache__", "tests", "benchmarks"}
"""Folders of distributions; a third of sympy is tests."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Function:
    """One function of a bundle."""

    name: str
    memory_mb: int
    timeout_s: int
    rewards: Mapping[str, str]
    """`module:attribute` by the reward's name in configurations."""


@dataclass(frozen=True)
class Bundle:
    """Functions with the top-level packages and the distributions that they need."""

    functions: tuple[Function, ...]
    packages: tuple[str, ...]
    """Import packages or modules that are taken as they are, such as `rewards`."""
    requires: tuple[str, ...] = ()
    """Distributions; what those need themselves comes with them."""

    @cached_property
    def files(self) -> dict[str, Path]:
        """Path in the bundle -> file here, but for the manifest. Raises BundleError."""
        found = {name: path for package in self.packages for name, path in _package_files(package)}
        for found_distribution in closure(self.requires, without=RUNTIME):
            found.update(_distribution_files(found_distribution))
        return dict(sorted(found.items()))

    @property
    def manifest(self) -> bytes:
        return json.dumps({f.name: asdict(f) for f in self.functions}, indent=1, sort_keys=True).encode()

    @property
    def unpacked_bytes(self) -> int:
        return len(self.manifest) + sum(path.stat().st_size for path in self.files.values())

    def check(self) -> None:
        """Raises BundleError for a bundle that Lambda would refuse."""
        if self.unpacked_bytes >= LIMIT_BYTES:
            raise BundleError(
                f"the bundle of {', '.join(f.name for f in self.functions)} unpacks to "
                f"{self.unpacked_bytes / 2**20:.0f} MiB, above Lambda's 250; deploy fewer rewards, or require less"
            )

    def write_zip(self, path: Path) -> str:
        """Write the deployment package; its SHA-256 in hex. Raises BundleError."""
        self.check()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            archive.writestr(_entry(MANIFEST), self.manifest)
            for name, source in self.files.items():
                archive.writestr(_entry(name), source.read_bytes())
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def link(self, directory: Path) -> None:
        """Lay the bundle out in an empty directory, by links to what is installed here: instant, and a change of the
        code is a change of the bundle. Raises BundleError."""
        self.check()
        _link(self.files, directory)
        (directory / MANIFEST).write_bytes(self.manifest)


def link_runtime(directory: Path) -> None:
    """Lay out what Lambda's runtime has installed, by links, in an empty directory."""
    files: dict[str, Path] = {}
    for found in closure(RUNTIME):
        files.update(_distribution_files(found))
    _link(files, directory)


def closure(requires: Iterable[str], without: Iterable[str] = ()) -> list[Distribution]:
    """The distributions of these names with all that they need, by name. Raises BundleError."""
    skipped = set() if not without else {canonicalize_name(d.metadata["Name"]) for d in closure(without)}
    found: dict[str, Distribution] = {}
    todo = list(requires)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found or name in skipped:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise BundleError(f"a reward requires {name!r}, which is not installed; install it and try again") from None
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                todo.append(needed.name)
    return [found[name] for name in sorted(found)]


def architecture() -> str:
    """Lambda's name for the architecture of this machine."""
    return "arm64" if platform.machine() in ("arm64", "aarch64") else "x86_64"


def runtime() -> str:
    """Lambda's name for this Python."""
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _package_files(package: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise BundleError(f"the package {package!r} can not be found or has no __init__.py; a reward needs one")
    origin = Path(spec.origin)
    if not spec.submodule_search_locations:
        yield origin.name, origin
        return
    for path in origin.parent.rglob("*"):
        inside = path.relative_to(origin.parent.parent)
        if path.is_file() and "__pycache__" not in inside.parts:
            yield inside.as_posix(), path


def _distribution_files(found: Distribution) -> dict[str, Path]:
    name, files = found.metadata["Name"], found.files
    if files is None:
        raise BundleError(f"{name} has no list of its files; install it from a wheel")
    pure = "Root-Is-Purelib: true" in (found.read_text("WHEEL") or "")
    if not pure and sys.platform != "linux":
        raise BundleError(f"{name} is compiled for {sys.platform}; bundle on Linux, as Lambda runs it")
    inside = {f.as_posix(): Path(str(f.locate())) for f in files if ".." not in f.parts and not f.is_absolute()}
    return {n: p for n, p in inside.items() if not _LEFT_OUT & set(n.split("/")) and p.is_file()}


def _link(files: Mapping[str, Path], directory: Path) -> None:
    """One link for each top-level name."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        top, *rest = name.split("/")
        link = directory / top
        if not link.is_symlink():
            link.symlink_to(path.parents[len(rest) - 1] if rest else path)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16  # Lambda runs as another user
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def read_manifest(text: str | bytes) -> dict[str, Function]:
    """The functions of a bundle. Raises ValueError, TypeError for what is no manifest."""
    tree: dict[str, Any] = json.loads(text)
    return {name: Function(**fields) for name, fields in tree.items()}
