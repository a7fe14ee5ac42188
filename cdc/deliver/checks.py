"""The doctor's checks of webhooks' settings: secrets, and whether the url may be sent to.

How far they are is in the verdict, which needs none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.deliver.sender import Sender
from cdc.errors import CDCError, ConfigError
from cdc.operate.findings import Finding, error, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config
    from cdc.config.webhooks import Webhook


def examine(config: Config) -> Iterator[Finding]:
    """Yield what is wrong with each webhook's settings, or that nothing is."""
    for name, webhook in config.webhooks.items():
        try:
            _check(webhook)
        except ConfigError as failure:
            yield error("webhook", f"{name}: {failure.what}", failure.hint)
        except CDCError as failure:
            yield warning("webhook", f"{name}: {failure.what}", failure.hint)
        else:
            what = f"{name}: {len(webhook.secrets)} secrets, and its url may be sent to"
            yield ok("webhook", what)


def _check(webhook: Webhook) -> None:
    """Raise what a sender would raise, without sending anything."""
    Sender(webhook).address()
