"""The doctor's checks of how long Kafka keeps the log, against how late its readers are.

Pure: from their lag. Whether they run is in the verdict; webhooks' settings are checked by
`cdc.deliver.checks`, the archive's own files by `cdc prove`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.operate.findings import Finding, note, ok, warning
from cdc.operate.readable import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdc.config import Config
    from cdc.operate.followers import FollowerStatus
    from cdc.operate.webhooks import WebhookStatus

# What its job, and every follower, may be down for at least: a machine that is replaced at night.
_LEAST_HOURS: Final = 12
# How many times the present lag must fit into the retention.
_TIMES: Final = 4
_HOUR: Final = 3_600.0


def check_archive(config: Config, statuses: Iterable[FollowerStatus]) -> Iterator[Finding]:
    """Yield which retention the archive's lag allows."""
    archive = next((each for each in statuses if each.is_archive), None)
    if archive is None or archive.unapplied is None or archive.unapplied.forgotten:
        return
    lag = archive.lag_seconds or 0.0
    kept = config.log.retention_hours
    needed = max(_LEAST_HOURS, _TIMES * (lag + config.archive.every_seconds) / _HOUR)
    waiting = f"the log has held for {duration(lag)} what is not archived"
    if kept < 0 or kept > needed:
        has = "for ever" if kept < 0 else f"{kept:g}"
        what = (
            f"{waiting}: log.retention_hours may be as low as {needed:.0f} (it is {has}), if no"
            " follower is ever down for longer"
        )
        yield note("archive_retention", what)
    elif lag / _HOUR > kept / _TIMES:
        what = f"{waiting}, and Kafka keeps the log for {kept:g} hours"
        yield warning("archive_retention", what, f"log.retention_hours: {needed:.0f}, `cdc setup`")
    else:
        yield ok("archive_retention", f"{waiting}; Kafka keeps the log for {kept:g} hours")


def check_webhooks(config: Config, statuses: Iterable[WebhookStatus]) -> Iterator[Finding]:
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
