"""`rollmill engine`: which generation engines are here, getting one, and running one for a run elsewhere.

Invariants: nothing is installed but by `install`; `check` starts a real server on a model made for it, and ends it;
`serve` starts what a run starts by itself, and ends with its command.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.command import ConfigArgument, SetOption, console, end_well_on_signals, one_line_errors

app = typer.Typer(help="The generation engines: list, install, check, serve.", no_args_is_help=True)


@app.command("list")
@one_line_errors
def show() -> None:
    """The engines that are here; the first vLLM is the one that is used."""
    from infra.engines.vllm_install import installations

    table = Table("engine", "version", "runs on", "where", "fit for use")
    table.add_row("hf", "", "CPU, GPU", "part of Rollmill", "yes")
    for found in installations():
        device = "CPU" if found.cpu else "GPU"
        table.add_row("vllm", found.version, device, f"{found.place}: {found.python}", escape(found.fault() or "yes"))
    console.print(table)


@app.command()
@one_line_errors
def install(
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU build, in an environment of its own (2.7 GB).")] = False,
    torch_index: Annotated[
        str | None, typer.Option(help="An index of CPU builds of torch, where your usual one has none.")
    ] = None,
) -> None:
    """Install vLLM: with --cpu its CPU build, else what is missing beside the vLLM that is here already."""
    from infra.engines.errors import EngineNotInstalled
    from infra.engines.vllm_install import find, install_cpu, install_plugin, installations

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if cpu:
        found = install_cpu(say, torch_index)
    else:
        present = [one for one in installations() if one.place != "CPU environment"]
        if not present:
            raise EngineNotInstalled("no vLLM here: `pip install vllm` on a machine with a GPU, or use --cpu")
        install_plugin(present[0].python)
        found = find()
    say(f"vLLM {found.version} is ready in {found.python}")


@app.command()
@one_line_errors
def check() -> None:
    """Start vLLM on a tiny model, generate a few tokens, and end it; minutes on a CPU."""
    from infra.engines.vllm_install import find

    found = find()
    console.print(f"vLLM {found.version} ({found.place}); starting it", highlight=False)
    with tempfile.TemporaryDirectory(prefix="rollmill-engine-") as directory:
        began = time.monotonic()
        report = _try(Path(directory))
    console.print(f"[green]ok[/green]  {report} in {time.monotonic() - began:.0f} s in all", highlight=False)


@app.command()
@one_line_errors
def serve(
    config: ConfigArgument,
    port: Annotated[int, typer.Option(help="Where it listens.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address it listens on; other than loopback, of a private net.")
    ] = "127.0.0.1",
    model: Annotated[
        Path | None, typer.Option(help="The run's base: `rollmill export ... base`. Without it, the source's model.")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
) -> None:
    """vLLM for a run that names this server in `engine.external`, as that run wants it, until it is interrupted. The
    key is in ROLLMILL_VLLM_KEY, here and there."""
    from flows.configure import load_config
    from flows.home import Home
    from flows.prepare import base_model
    from infra.compute.lifeline import tail
    from infra.engines.errors import EngineClosed
    from infra.engines.vllm_config import vllm_server
    from infra.proxy.secret import key_of_servers
    from rl.config.engine import VLLMEngineSection
    from rl.errors import ConfigError

    found, home = load_config(config, overrides), Home.default()
    if not isinstance(found.engine, VLLMEngineSection):
        raise ConfigError(f"engine.type: {found.engine.type} can not be served; set engine.type=vllm")
    key, base = key_of_servers(), model or base_model(found, home.models)
    end_well_on_signals()
    with vllm_server(found, found.engine, base, home.root / "engines" / str(port), port, key, host=host) as server:
        console.print(f"starting vLLM with {base}; its log is {server.log}", highlight=False, soft_wrap=True)
        server.wait_ready()
        console.print(f"serving at {server.url}: the run names it in engine.external", highlight=False, soft_wrap=True)
        while server.alive:
            time.sleep(1.0)
        raise EngineClosed(f"vLLM ended; the end of {server.log}:\n{tail(server.log)}")


def _try(directory: Path) -> str:
    import asyncio
    import secrets

    from infra.engines.protocol import BASE, Sampling
    from infra.engines.vllm import VLLMEngine
    from infra.engines.vllm_server import VLLMServer
    from infra.models.tiny import write_tiny
    from infra.services.processes import free_port
    from rl.config.model import TinySection

    model, key = directory / "model", secrets.token_urlsafe(32)
    write_tiny(TinySection(), 0, model)
    server = VLLMServer(model, home=directory / "home", port=free_port(set()), key=key)

    async def generate() -> int:
        engine = VLLMEngine(server.url, key, model_dir=model, staging=directory / "staging", base_version=0)
        await engine.start()
        try:
            result = await engine.generate([1, 2, 3], Sampling(1.0, 16, ()), BASE, "check")
        finally:
            await engine.close()
        return len(result.token_ids)

    with server:
        server.wait_ready()
        return f"{asyncio.run(generate())} tokens"
