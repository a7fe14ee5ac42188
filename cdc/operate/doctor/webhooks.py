"""The doctor's check of how long webhooks may be late: their lag against the topics' retention.

Pure: from their state. Their settings are checked by `cdc.deliver.checks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.operate.findings import Finding, ok, warning
from cdc.operate.readable import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.operate.webhooks import WebhookStatus

# How many times the present lag must fit into the retention.
_TIMES: Final = 4
_HOUR: Final = 3_600.0


def check_webhooks(config: Config, statuses: Sequence[WebhookStatus]) -> Iterator[Finding]:
    """Yield whether what each webhook has not delivered stays in the log for long enough."""
    kept = config.log.retention_hours
    for each in statuses:
        lag = each.lag_seconds
        if each.group is None or each.group.gap or lag is None:
            continue
        waiting = f"{each.name}: the log has held for {duration(lag)} what is not acknowledged"
        if 0 <= kept < _TIMES * lag / _HOUR:
            what = f"{waiting}, and Kafka deletes it after {kept:g} hours"
            needed = max(1.0, _TIMES * lag / _HOUR)
            yield warning(
                "webhook_lag",
                what,
                each.command or f"log.retention_hours: {needed:.0f}, then `cdc setup`",
            )
        else:
            held = "for ever" if kept < 0 else f"for {kept:g} hours"
            yield ok("webhook_lag", f"{waiting}; Kafka keeps the log {held}")
