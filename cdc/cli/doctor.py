"""`cdc doctor`: what would stop the pipeline, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdc.cli.options import as_json, echo, example, next_step, print_json, with_config
from cdc.operate.findings import Severity, worst

if TYPE_CHECKING:
    from cdc.config import Config

_MARKS = {"ok": ("✓", "green"), "note": ("·", "blue"), "warning": ("!", "yellow")}
_MARKS |= {"error": ("✗", "red")}


@click.command(epilog=example("cdc doctor", "cdc doctor --json | jq '.findings[].fix'"))
@with_config
@as_json
@click.option("--quiet", is_flag=True, help="Leave out what is correct.")
def doctor(config: Config, *, as_json: bool, quiet: bool) -> int:
    """Find what would stop the pipeline, with the SQL or command that fixes it.

    Checks the server, privileges, tables, publication, slot, brokers, topics, transactions, and
    whether slot and log still match, and webhooks' secrets, urls and lag. Changes nothing; may run
    while the daemon runs.

    Exits 0 when there are no errors (warnings are allowed), 1 when there are.
    """
    from cdc.deliver import checks  # noqa: PLC0415 - not for --help
    from cdc.operate.doctor.run import examine  # noqa: PLC0415 - as above

    findings = [*examine(config), *checks.examine(config)]
    bad = worst(findings) is Severity.ERROR
    if as_json:
        print_json({"ok": not bad, "findings": [each.fields() for each in findings]})
        return int(bad)
    for finding in findings:
        if not (quiet and finding.severity is Severity.OK):
            mark, colour = _MARKS[finding.severity.value]
            echo(f"{click.style(mark, fg=colour, bold=True)} {finding.check}: {finding.what}")
            if finding.fix:
                echo(f"    {click.style('fix:', dim=True)} {finding.fix}")
    set_up = not any(each.fix.startswith("cdc setup") for each in findings)
    if bad:
        next_step("fix what is marked ✗, then run cdc doctor again")
    elif set_up:
        next_step("cdc run, or cdc status if it runs already")
    else:
        next_step("cdc setup creates what is missing")
    return int(bad)
