"""`cdc trace`: traces of transactions, from their commit into each store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from cdc.cli import stopping
from cdc.cli.options import as_json, echo, example, print_done, print_json, with_config

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.operate.span_export import SpanCounts

_LINE_SECONDS: Final = 10.0


@click.command(epilog=example("cdc trace", "cdc trace --json"))
@with_config
@as_json
def trace(config: Config, *, as_json: bool) -> None:
    """Send traces of transactions to an OpenTelemetry receiver, until Ctrl-C.

    Each shows when a transaction was committed, published and applied by every follower. Traced are
    those whose application sends its `traceparent`, and a sample of the others. It only reads the
    log, on any host, and needs the extra `tracing` and `tracing.endpoint`. See docs/TRACING.md.
    """
    from cdc.runtime import extras  # noqa: PLC0415 - not for --help

    extras.require("cdc trace", "tracing")
    from cdc.operate import span_export  # noqa: PLC0415 - as above

    over = stopping.requested()
    line_at = time.monotonic()

    def report(counts: SpanCounts) -> None:
        nonlocal line_at
        if time.monotonic() >= line_at:
            line_at = time.monotonic() + _LINE_SECONDS
            _print_counts(counts, as_json=as_json)

    counts = span_export.export(config, over.is_set, report)
    _print_counts(counts, as_json=as_json)
    if not as_json:
        print_done("stopped")


def _print_counts(counts: SpanCounts, *, as_json: bool) -> None:
    if as_json:
        print_json(counts._asdict())
        return
    parts = [f"{counts.traced:,} traced", f"{counts.open:,} open", f"{counts.sent:,} spans sent"]
    if counts.expired:
        parts.append(f"{counts.expired:,} ended without every store")
    if counts.left_out:
        parts.append(f"{counts.left_out:,} left out, too many were open")
    if counts.lost:
        parts.append(f"{counts.lost:,} spans lost: the receiver does not take them")
    echo("; ".join(parts))
