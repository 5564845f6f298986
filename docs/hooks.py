"""Pages that the build makes from the code (`flows/reference.py`, `flows/sizing.py`); nothing of them is checked in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from flows.reference import configuration_page, troubleshooting_page
from flows.sizing import tables
from rl.config.run import RunConfig
from rl.config.tenants import Job, ServiceConfig

HERE = Path(__file__).parent
OPENING = (
    "Every field of a configuration, from the types that read it. A configuration is a YAML file or a preset "
    "(`rollmill presets`); any field is overridden by `--set`, such as `--set training.steps=10` or "
    "`--set domains.0.weight=2`. Where a section has a `type`, that field chooses among the variants below. Unknown "
    "fields are errors, and a mistake is one line that names field, value and mend."
)
SERVICE = "A service for many tenants: what `rollmill tenants serve` reads."
JOB = "What a tenant hands in: what `rollmill tenants submit` reads. Sections that are not here are the service's."
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": lambda: configuration_page(RunConfig, "Configuration", OPENING),
    "configuration_tenants.md": lambda: configuration_page(ServiceConfig, "Configuration of a service", SERVICE),
    "configuration_jobs.md": lambda: configuration_page(Job, "Configuration of a job", JOB),
    "troubleshooting.md": lambda: troubleshooting_page(yaml.safe_load((HERE / "mends.yaml").read_text())),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "sizing.md":
        for place, table in tables().items():
            markdown = markdown.replace(place, table)
    return markdown
