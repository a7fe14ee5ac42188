"""`cdc webhook`: send changes to receivers over HTTP, and decide on what they refused."""

from __future__ import annotations

import base64
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import click

from cdc.cli import given_up, stopping
from cdc.cli.options import (
    as_json,
    echo,
    example,
    print_done,
    print_json,
    print_warning,
    with_config,
    yes,
)

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.deliver.webhooks import WebhookRun

_LINE_SECONDS: Final = 10.0
_SECRET_BYTES: Final = 32


@click.group(
    epilog=example("cdc webhook secret", "cdc webhook run", "cdc webhook undelivered billing")
)
def webhook() -> None:
    """Send tables' changes to receivers over HTTP, each key's in order, at least once.

    See docs/WEBHOOKS.md for messages, signatures, retries and what a receiver has to do.
    """


@webhook.command(epilog=example("cdc webhook run", "cdc webhook run billing"))
@with_config
@click.argument("names", metavar="[NAME]...", nargs=-1)
@as_json
def run(config: Config, names: tuple[str, ...], *, as_json: bool) -> None:
    """Deliver the webhooks named (default: all) until Ctrl-C; several processes share the work."""
    from cdc.deliver import webhooks  # noqa: PLC0415 - not for --help
    from cdc.errors import ConfigError  # noqa: PLC0415 - as above

    chosen = names or tuple(config.webhooks)
    if not chosen:
        raise ConfigError("the configuration has no webhooks", hint="see docs/WEBHOOKS.md")
    over = stopping.requested()
    for name in chosen:
        webhooks.chosen(config, name)
    running: dict[str, WebhookRun] = {}
    print_done(f"delivering {', '.join(chosen)}; Ctrl-C ends it")
    with ThreadPoolExecutor(len(chosen)) as pool:
        ended = [
            pool.submit(webhooks.deliver, config, name, over.is_set, running) for name in chosen
        ]
        for future in ended:
            future.add_done_callback(lambda _: over.set())
        while not over.wait(_LINE_SECONDS):
            for name, each in list(running.items()):
                _print_counts(name, each, as_json=as_json)
    for future in ended:
        future.result()


def _print_counts(name: str, each: WebhookRun, *, as_json: bool) -> None:
    counts = each.counts
    if as_json:
        print_json({"webhook": name, "at": time.time(), **counts._asdict()})
        return
    line = f"{name}: {counts.delivered:,} delivered, {counts.held:,} held"
    if counts.failing:
        line += f", {counts.failing:,} keys are refused"
    if counts.given_up:
        line += f", {counts.given_up:,} given up"
    (print_warning if counts.away else echo)(line + (f"; {counts.away}" if counts.away else ""))


@webhook.command(epilog=example("cdc webhook status", "cdc webhook status --json"))
@with_config
@as_json
def status(config: Config, *, as_json: bool) -> None:
    """Show how far each webhook is, and what it gave up; exit 1 if one needs a person."""
    from cdc.operate.findings import Level  # noqa: PLC0415 - not for --help
    from cdc.operate.webhooks import WebhooksReader, judge  # noqa: PLC0415 - as above

    with closing(WebhooksReader(config)) as reader:
        found = reader.read()
    causes = list(judge(found))
    if as_json:
        print_json([each.fields() for each in found])
    for each in () if as_json else found:
        _print_status(each.fields())
    for cause in () if as_json else causes:
        print_warning(f"{cause.what}: {cause.remedy}")
    if any(cause.level is Level.FAILED for cause in causes):
        raise click.exceptions.Exit(1)


def _print_status(fields: dict[str, Any]) -> None:
    line = f"{fields['name']}: {fields['state'].replace('_', ' ')}"
    if fields["lag"] is not None:
        line += f", {fields['members']} members, {fields['lag']:,} offsets are not acknowledged"
    echo(line)


@webhook.command(epilog=example("cdc webhook secret"))
@as_json
def secret(*, as_json: bool) -> None:
    """Print a new secret to sign messages with; configuration and receiver both need it."""
    made = f"whsec_{base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()}"
    if as_json:
        print_json({"secret": made})
    else:
        click.echo(made)


@webhook.command(epilog=example("cdc webhook undelivered billing"))
@with_config
@click.argument("name")
@as_json
def undelivered(config: Config, name: str, *, as_json: bool) -> None:
    """List what the webhook NAME gave up, and what was decided on it."""
    import msgspec  # noqa: PLC0415 - not for --help

    from cdc.deliver import undelivered as found  # noqa: PLC0415 - as above
    from cdc.deliver import webhooks  # noqa: PLC0415 - as above
    from cdc.log.group_records import webhook_group  # noqa: PLC0415 - as above

    webhooks.chosen(config, name)
    records = list(found.read(config, webhook_group(name)))
    if as_json:
        print_json([msgspec.structs.asdict(each) for each in records])
        return
    given_up.show(
        records,
        f"the webhook {name}",
        f"cdc webhook send {name} ID, or cdc webhook discard {name} ID",
    )


@webhook.command(epilog=example("cdc webhook send billing shop-1-1042", "cdc webhook send billing"))
@with_config
@click.argument("name")
@given_up.ids
@as_json
def send(config: Config, name: str, ids: tuple[str, ...], *, as_json: bool) -> None:
    """Send undelivered events of the webhook NAME again (default: all), out of their order."""
    from cdc.deliver import webhooks  # noqa: PLC0415 - not for --help

    done = webhooks.send_again(config, name, ids)
    if as_json:
        print_json([{"id": each, "delivered": not why, "why": why} for each, why in done])
    else:
        for each, why in done:
            (print_warning if why else print_done)(f"{each}: {why or 'delivered'}")
    if any(why for _, why in done):
        raise click.exceptions.Exit(1)


@webhook.command(
    epilog=example("cdc webhook discard billing shop-1-1042", "cdc webhook discard billing --yes")
)
@with_config
@click.argument("name")
@given_up.ids
@yes
@as_json
def discard(config: Config, name: str, ids: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Decide that undelivered events of the webhook NAME (default: all) are not sent."""
    from cdc.log.group_records import webhook_group  # noqa: PLC0415 - not for --help

    why = "The receiver never gets it."
    given_up.discard(config, webhook_group(name), ids, why, yes=yes, as_json=as_json)
