"""`cdc metrics`: what the daemon exports, and the alert rules and the dashboard for it."""

from __future__ import annotations

import click

from cdc.cli.options import as_json as json_option
from cdc.cli.options import echo, example, next_step, print_json


@click.group()
def metrics() -> None:
    """Print the metrics, alert rules and a dashboard.

    All come from one table, and need no configuration and no server.
    """


@metrics.command("list", epilog=example("cdc metrics list", "cdc metrics list --json"))
@json_option
def show(*, as_json: bool) -> None:
    """Print each metric: its kind, labels and meaning."""
    from cdc.operate.metric_table import EVERY  # noqa: PLC0415 - not for --help

    if as_json:
        print_json({name: each._asdict() for name, each in sorted(EVERY.items())})
        return
    for name, each in sorted(EVERY.items()):
        labels = f"{{{','.join(each.labels)}}}" if each.labels else ""
        echo(f"{name}{labels} ({each.kind}): {each.meaning}")
    next_step("curl http://HOST:PORT/metrics, at http.listen")


@metrics.command(epilog=example("cdc metrics rules > lockstep-rules.yaml"))
def rules() -> None:
    """Print alert rules for Prometheus, as YAML."""
    from cdc.operate import alerts  # noqa: PLC0415 - not for --help

    click.echo(alerts.rules(), nl=False)
    next_step("name the file in rule_files; adapt the limits")


@metrics.command(epilog=example("cdc metrics dashboard > lockstep.json"))
def dashboard() -> None:
    """Print a dashboard for Grafana, as JSON."""
    from cdc.operate import alerts  # noqa: PLC0415 - not for --help

    click.echo(alerts.dashboard(), nl=False)
    next_step("import the file in Grafana, and choose the data source")
