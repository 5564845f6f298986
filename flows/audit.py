"""`rollmill audit`: whether a run's store holds what its log says.

Invariant: it writes nothing and may run beside a live run; exit code 1 exactly if something is wrong.
"""

from __future__ import annotations

import typer

from flows.command import ConfigArgument, SetOption, console, one_line_errors, services


@one_line_errors
def audit(config: ConfigArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Check a run from its store alone: nothing lost, nothing trained twice, no sample too old, every checksum."""
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services(("s3",)):
        from flows.prepare import reach
        from flows.report import no_version
        from infra.store.audit import audit as read
        from rl.account import Kind

        store = reach(settled)
        found = read(store, settled.prefix)
        if not found.account.lsn:  # a run that is not there is an error, not a clean one
            raise no_version(settled, store)
        for finding in found.findings:
            console.print(str(finding), style="red", highlight=False, soft_wrap=True, markup=False)
        counts = ", ".join(f"{kind.value.replace('_', ' ')} {found.count(kind)}" for kind in Kind)
        console.print(
            f"{found.account.lsn} records, {found.segments} segments, {found.states} states read: {counts}",
            highlight=False,
            soft_wrap=True,
        )
    if found.findings:
        raise typer.Exit(1)
